"""HTML elements of the report."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["PARTS", "bars", "figure", "page", "row", "table", "tiles"]

# In stacking order; also the names of their colours
PARTS = ("compute", "input", "transfer", "waiting", "checkpoint")
_STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --faint: #57606a; --grid: #d8dee4;
  --card: #f6f8fa; --compute: #3b6ea8; --input: #3f8f4f; --transfer: #d9822b;
  --waiting: #c8393c; --checkpoint: #8a5fa3; --neutral: #6b7785;
  color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --ink: #e6e9ed;
  --faint: #9aa5b1; --grid: #333b45; --card: #1d232b; --compute: #6ea3dd;
  --input: #6fbf7d; --transfer: #eda757; --waiting: #ef6f6c; --checkpoint: #b994d1;
  --neutral: #93a1b0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 74rem; background: var(--paper);
  color: var(--ink); font: 16px/1.45 system-ui, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: .2rem 0; } h2 { font-size: 1.1rem; margin: 0; }
p { margin: .2rem 0 .6rem; } .note, .subtitle { color: var(--faint); font-size: .9rem; }
.tiles { display: grid; gap: .6rem; margin: 1rem 0;
  grid-template-columns: repeat(auto-fit, minmax(6.8rem, 1fr)); }
.tile { background: var(--card); border-radius: .4rem; padding: .5rem .7rem;
  border-top: .25rem solid var(--grid); }
.tile b { display: block; font-size: 1.25rem; white-space: nowrap; }
.tile span { color: var(--faint); font-size: .85rem; }
.findings { background: var(--card); border-radius: .4rem;
  padding: .6rem 1rem .6rem 2rem; }
.charts { display: grid; gap: 1.2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); }
figure, section { margin: 1rem 0; min-width: 0; }
figure p { font-size: .85rem; color: var(--faint); }
svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: var(--ink); } svg .label { fill: var(--faint); }
.grid { stroke: var(--grid); stroke-width: 1; } .axis { stroke: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .85rem;
  margin: .4rem 0; } .legend span { white-space: nowrap; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; }
.row { display: grid; align-items: center; gap: .1rem .7rem; margin: .35rem 0;
  grid-template-columns: minmax(8rem, 18rem) 1fr 6.5rem; font-size: .9rem; }
.row .name { overflow-wrap: anywhere; } .row .host { color: var(--faint);
  font-size: .8rem; margin-left: .4em; }
.row .value { text-align: right; white-space: nowrap; }
.mark { background: var(--waiting); color: var(--paper); border-radius: .3rem;
  padding: 0 .4em; font-size: .8rem; margin-left: .4em; }
.bar { display: flex; height: 1.15rem; background: var(--card); }
.bar i { display: block; height: 100%; }
.scale { display: flex; justify-content: space-between; color: var(--faint);
  font-size: .8rem; border-top: 1px solid var(--faint); }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
.wide { overflow-x: auto; } th, td { text-align: right; padding: .2rem .5rem;
  border-bottom: 1px solid var(--grid); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal;
  overflow-wrap: anywhere; }
.line-estimate { fill: none; stroke: var(--compute); stroke-width: 2.5; }
.line-ideal { fill: none; stroke: var(--faint); stroke-width: 1.2;
  stroke-dasharray: 5 4; } .now { fill: var(--waiting); }
.by-0 { background: var(--compute); } .by-1 { background: var(--transfer); }
.by-2 { background: var(--input); } .by-3 { background: var(--checkpoint); }
@media (max-width: 40rem) { .row { grid-template-columns: 1fr auto; }
  .row .bar, .row .scale { grid-column: 1 / -1; grid-row: 2; }
  th, td { padding: .2rem .3rem; } table { font-size: .8rem; } }
"""


def _colours() -> str:
    lines = [
        f".bar .{n}, .legend .{n} {{ background: var(--{n}); }} "
        f"svg .{n} {{ fill: var(--{n}); }} .tile.{n} {{ border-color: var(--{n}); }}"
        for n in (*PARTS, "neutral")
    ]
    return "\n".join(lines)


def page(title: str, subtitle: str, body: str) -> str:
    """Return a page. `body` is HTML; all other arguments, also below, are text."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{_STYLE}{_colours()}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<p class="subtitle">{html.escape(subtitle)}</p>
{body}
</body>
</html>
"""


def tiles(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return tiles, given label, number and CSS class of each."""
    found = [
        f'<div class="tile {kind}"><b>{html.escape(value)}</b>'
        f"<span>{html.escape(label)}</span></div>"
        for label, value, kind in rows
    ]
    return f'<div class="tiles">{"".join(found)}</div>'


def figure(title: str, note: str, chart: str) -> str:
    """Return a chart with a title and a note; `chart` is HTML."""
    legend = _legend() if "<rect" in chart and 'class="input"' in chart else ""
    return (
        f"<figure><h2>{html.escape(title)}</h2>{legend}{chart}"
        f"<p>{html.escape(note)}</p></figure>"
    )


def _legend() -> str:
    found = [f'<span><i class="{name}"></i>{name}</span>' for name in PARTS]
    return f'<div class="legend">{"".join(found)}</div>'


def row(
    name: str,
    mark: str,
    more: str,
    pieces: Sequence[tuple[str, float, str]],
    value: str,
) -> str:
    """Return a row: a name, a stacked bar and a value.

    Args:
      name: the label of the row.
      mark: a highlighted word after the name, or "".
      more: smaller text after the name, or "".
      pieces: CSS class, fraction of the width, and note of each part of the bar.
      value: the number after the bar.
    """
    marked = f'<span class="mark">{html.escape(mark)}</span>' if mark else ""
    small = f'<span class="host">{html.escape(more)}</span>' if more else ""
    shown = [
        f'<i class="{kind}" style="width:{100 * share:.3f}%" '
        f'title="{html.escape(note, quote=True)}"></i>'
        for kind, share, note in pieces
        if share > 0
    ]
    return (
        f'<div class="row"><span class="name">{html.escape(name)}{marked}{small}</span>'
        f'<div class="bar">{"".join(shown)}</div>'
        f'<span class="value">{html.escape(value)}</span></div>'
    )


def bars(
    title: str, note: str, rows: Sequence[str], most: str, has_legend: bool = False
) -> str:
    """Return rows with a title, a note, and a scale from 0 to `most`."""
    legend = _legend() if has_legend else ""
    scale = (
        '<div class="row"><span></span><div class="scale"><span>0</span>'
        f"<span>{html.escape(most)}</span></div><span></span></div>"
    )
    return (
        f"<section><h2>{html.escape(title)}</h2>"
        f'<p class="note">{html.escape(note)}</p>{legend}{"".join(rows)}{scale}'
        "</section>"
    )


def table(
    title: str, note: str, head: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """Return a table with a title and a note."""
    cells = "".join(f"<th>{html.escape(text)}</th>" for text in head)
    lines = [
        "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in line) + "</tr>"
        for line in rows
    ]
    return (
        f'<section><h2>{html.escape(title)}</h2><p class="note">{html.escape(note)}</p>'
        f'<div class="wide"><table><tr>{cells}</tr>{"".join(lines)}</table></div>'
        "</section>"
    )
