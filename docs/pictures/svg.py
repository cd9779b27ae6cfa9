"""SVG pictures that are readable on light and dark pages, and on phones."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["Picture", "text_width"]

# A picture has its own paper, so that it is readable where the page's colour was chosen
# by a button, which a picture cannot see
_STYLE = """
text { font: 13px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink) }
.small { font-size: 12px; fill: var(--soft) } .bold { font-weight: 600 }
.middle { text-anchor: middle } .end { text-anchor: end }
.paper { fill: var(--paper) } .box { fill: var(--box); stroke: var(--soft) }
.grid { stroke: var(--grid) } .axis { stroke: var(--soft) }
.arrow { stroke: var(--soft); fill: none }
.head { fill: var(--soft) } .on-color { fill: var(--on) }
.limit { stroke: var(--ink); stroke-dasharray: 5 4; fill: none }
.beyond { fill: var(--grid) }
.f0 { fill: var(--c0) } .f1 { fill: var(--c1) } .f2 { fill: var(--c2) }
.f3 { fill: var(--c3) }
.s0 { stroke: var(--c0) } .s1 { stroke: var(--c1) } .s2 { stroke: var(--c2) }
.s3 { stroke: var(--c3) } .line { fill: none; stroke-width: 2 }
svg { --ink: #1c2127; --soft: #59636e; --paper: #ffffff; --grid: #e3e7eb;
  --box: #f2f5f8; --on: #ffffff;
  --c0: #0b6e99; --c1: #b3541e; --c2: #5f7d1a; --c3: #8a4fa3 }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e9ec; --soft: #a2acb6;
  --paper: #16191d; --grid: #30363d; --box: #22272d; --on: #101214;
  --c0: #4fb6e3; --c1: #ef8f56; --c2: #a9c95b; --c3: #c79be0 } }
"""


def text_width(text: str, size: float = 13) -> float:
    """Return about how many pixels a text takes, rather more than less."""
    return len(text) * size * 0.58


class Picture:
    """An SVG picture that grows with what is drawn. Coordinates are pixels."""

    def __init__(self, width: int, height: int, title: str):
        self.width, self.height = width, height
        self.parts = [f"<title>{html.escape(title)}</title>"]

    def text(self, x: float, y: float, text: str, style: str = "") -> None:
        """Write one line; `style` has classes such as "small end"."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}"{_class(style)}>{html.escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, style: str = "box"
    ) -> None:
        """Draw a rectangle with round corners."""
        self.parts.append(
            f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" '
            f'rx="3"{_class(style)}/>'
        )

    def line(self, points: Iterable[Sequence[float]], style: str) -> None:
        """Connect points."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline points="{path}"{_class(style)}/>')

    def area(self, points: Iterable[Sequence[float]], style: str) -> None:
        """Fill a polygon."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polygon points="{path}"{_class(style)}/>')

    def dot(self, x: float, y: float, style: str) -> None:
        """Draw a point of a line."""
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"{_class(style)}/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float) -> None:
        """Draw an arrow, upright or level."""
        self.line([(x1, y1), (x2, y2)], "arrow")
        dx, dy = _sign(x2 - x1), _sign(y2 - y1)
        tip = [(x2, y2), (x2 - 7 * dx - 4 * dy, y2 - 7 * dy - 4 * dx)]
        tip.append((x2 - 7 * dx + 4 * dy, y2 - 7 * dy + 4 * dx))
        path = " ".join(f"{x:g},{y:g}" for x, y in tip)
        self.parts.append(f'<polygon points="{path}" class="head"/>')

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(str(self))

    def __str__(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        view = f'viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img">'
        paper = f'<rect width="{self.width}" height="{self.height}" class="paper"/>'
        body = "\n".join([paper, *self.parts])
        return f"{head}\n<style>{_STYLE}</style>\n{body}\n</svg>\n"


def _class(style: str) -> str:
    return f' class="{style}"' if style else ""


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)
