"""Small SVG charts, coloured by the style sheet of the page.

All are as wide as a phone's screen, so that their text is readable there; on wider
screens a page puts several of them side by side.
"""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Iterable, Sequence

__all__ = [
    "Series",
    "histogram",
    "lines",
    "quantity",
    "stacked",
    "tick_text",
    "unit_of",
]

_WIDTH, _HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 20, 14, 42
_TICK_PIXELS = 46  # between labels on the x axis
Series = tuple[str, Sequence[float]]  # name (also its CSS class) and values


def unit_of(most_seconds: float) -> tuple[str, float]:
    """Return the unit for durations up to `most_seconds`, and the unit in seconds."""
    for unit, seconds in (("s", 1.0), ("ms", 1e-3)):
        if most_seconds >= seconds:
            return unit, seconds
    return "us", 1e-6


def quantity(number: float) -> str:
    """Format a number with two or three significant digits."""
    if number == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    text = f"{number:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def tick_text(number: float) -> str:
    """Return a number in the few characters that have room at an axis, as "1.5k"."""
    for letter, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return quantity(number / size) + letter
    return quantity(number)


def _ticks(most: float, count: int = 5) -> list[float]:
    """Return round numbers from 0 to a little more than `most`."""
    if most < 1e-200:  # it may have come from a file
        return [0.0, 1.0]
    rough = most / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * 0.999)
    return [step * i for i in range(math.ceil(most / step * 0.999) + 1)]


class _Frame:
    """Axes of a chart, and the conversion of numbers to positions.

    Args:
      title: the text alternative, for screen readers.
      most: the largest number on the y axis.
      y_label: label of the y axis, with the unit.
      x_label: likewise.
    """

    def __init__(self, title: str, most: float, y_label: str, x_label: str):
        self._parts = [
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
            f'aria-label="{html.escape(title, quote=True)}">'
        ]
        ticks = _ticks(most)
        self.most = ticks[-1]
        for tick in ticks:
            y = self.y(tick)
            self.add(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" ', y, y)
            self.text(_LEFT - 6, y + 4, tick_text(tick), "end")
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        self._parts.append(
            f'<text class="label" text-anchor="middle" transform="translate(11 {middle}'
            f') rotate(-90)">{html.escape(y_label)}</text>'
        )
        self.text(
            (_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 5, x_label, "middle", "label"
        )

    def y(self, value: float) -> float:
        """Return the y position of a number."""
        height = _HEIGHT - _TOP - _BOTTOM
        return round(_HEIGHT - _BOTTOM - height * value / self.most, 2)

    def x(self, share: float) -> float:
        """Return the x position of a fraction of the width."""
        return round(_LEFT + (_WIDTH - _LEFT - _RIGHT) * share, 2)

    def add(self, text: str, y1: float, y2: float) -> None:
        """Add a line, given the start of its element and its y positions."""
        self._parts.append(f'{text}y1="{y1}" y2="{y2}"/>')

    def text(
        self, x: float, y: float, text: str, anchor: str, kind: str = "tick"
    ) -> None:
        """Add text."""
        self._parts.append(
            f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">'
            f"{html.escape(text)}</text>"
        )

    def bar(
        self, kind: str, left: float, right: float, low: float, high: float, note: str
    ) -> None:
        """Add a rectangle; `left` and `right` are fractions of the width."""
        x, y = self.x(left), self.y(high)
        width, height = round(self.x(right) - x, 2), round(self.y(low) - y, 2)
        if height > 0:
            self._parts.append(
                f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" '
                f'height="{height}"><title>{html.escape(note)}</title></rect>'
            )

    def raw(self, text: str) -> None:
        """Add an element."""
        self._parts.append(text)

    def x_ticks(self, ticks: Iterable[tuple[float, str]]) -> None:
        """Label fractions of the width; skip labels that would overlap."""
        last = -math.inf
        for share, text in ticks:
            x = self.x(share)
            if x - last >= _TICK_PIXELS:
                last = x
                self.add(
                    f'<line class="axis" x1="{x}" x2="{x}" ',
                    _HEIGHT - _BOTTOM,
                    _HEIGHT - _BOTTOM + 4,
                )
                self.text(x, _HEIGHT - _BOTTOM + 16, text, "middle")
        self.add(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" ',
            _HEIGHT - _BOTTOM,
            _HEIGHT - _BOTTOM,
        )

    def done(self) -> str:
        """Return the chart."""
        return "".join([*self._parts, "</svg>"])


def stacked(title: str, edges: Sequence[float], parts: Sequence[Series]) -> str:
    """Return stacked bars of seconds per part, over step numbers.

    Args:
      title: of the chart.
      edges: of the bars, ascending.
      parts: the seconds of each bar, from the lowest part up.
    """
    totals = [sum(values) for values in zip(*[values for _, values in parts])]
    most = max(totals, default=0.0)
    unit, size = unit_of(most)
    frame = _Frame(title, most / size, f"time per step, {unit}", "step number")
    start, width = edges[0], (edges[-1] - edges[0]) or 1.0
    for i, (left, right) in enumerate(itertools.pairwise(edges)):
        low = 0.0
        for name, values in parts:
            high = low + values[i] / size
            note = f"{name}: {quantity(values[i] / size)} {unit}"
            box = (left - start) / width, (right - start) / width
            frame.bar(name, *box, low, high, note)
            low = high
    ticks = [t for t in _ticks(edges[-1], 4) if start <= t <= edges[-1]]
    frame.x_ticks(((tick - start) / width, tick_text(tick)) for tick in ticks)
    return frame.done()


def histogram(title: str, rows: Sequence[tuple[float, float, int]]) -> str:
    """Return a histogram of step durations, on a logarithmic axis.

    Args:
      title: of the chart.
      rows: lower bound and upper bound in seconds, and number of steps; ascending.
    """
    usual = max(rows, key=lambda row: row[2], default=(1.0, 1.0, 1))
    unit, size = unit_of(usual[0])
    most = usual[2]
    frame = _Frame(title, most, "steps", f"duration, {unit} (logarithmic)")
    low = math.log(rows[0][0] / size) if rows else 0.0
    high = math.log(rows[-1][1] / size) if rows else 1.0
    if high - low < math.log(3):  # a few bars would fill the chart
        middle, half = (low + high) / 2, math.log(3) / 2
        low, high = middle - half, middle + half

    def share(seconds: float) -> float:
        return (math.log(seconds / size) - low) / (high - low)

    for begin, end, count in rows:
        note = f"{quantity(begin / size)} to {quantity(end / size)} {unit}: {count}"
        frame.bar("neutral", share(begin), share(end), 0, count, note)
    lowest, highest = math.floor(low / math.log(10)), math.ceil(high / math.log(10))
    factors = (1, 2, 5) if high - low > math.log(10) else (1, 1.5, 2, 3, 4, 5, 7)
    ticks = [f * 10.0**power for power in range(lowest, highest + 1) for f in factors]
    frame.x_ticks(
        (share(tick * size), tick_text(tick))
        for tick in ticks
        if 0 <= share(tick * size) <= 1
    )
    return frame.done()


def lines(
    title: str, places: Sequence[int], series: Sequence[Series], now: int, y_label: str
) -> str:
    """Return lines over the number of ranks, on a logarithmic axis.

    Args:
      title: of the chart.
      places: numbers of ranks, ascending.
      series: values for each of them.
      now: the measured number of ranks.
      y_label: label of the y axis.
    """
    most = max(max(values) for _, values in series)
    frame = _Frame(title, most, y_label, "ranks (logarithmic)")
    low, high = math.log(places[0]), math.log(places[-1])

    def share(place: int) -> float:
        return (math.log(place) - low) / (high - low) if high > low else 0.5

    for name, values in series:
        points = " ".join(
            f"{frame.x(share(place))},{frame.y(value)}"
            for place, value in zip(places, values)
        )
        frame.raw(f'<polyline class="line-{name}" points="{points}"/>')
    x, value = frame.x(share(now)), series[0][1][list(places).index(now)]
    frame.raw(
        f'<circle class="now" cx="{x}" cy="{frame.y(value)}" r="4">'
        "<title>measured</title></circle>"
    )
    frame.x_ticks((share(place), str(place)) for place in places)
    return frame.done()
