"""The HTML table that notebooks show for an object."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["html_table"]


def html_table(title: str, rows: Iterable[tuple[str, object]], note: str = "") -> str:
    """Return an HTML table of names and values, with a title above and a note below."""
    cells = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows
    )
    below = f"<p>{html.escape(note)}</p>" if note else ""
    caption = f"<caption>{html.escape(title)}</caption>"
    return f"<div><table>{caption}<tbody>{cells}</tbody></table>{below}</div>"
