"""One-line reprs, of what is known without reading files; tables and text to show."""

from __future__ import annotations

from collections.abc import Callable, Iterable

MOST_CHARACTERS = 120


def one_line(thing: object, describe: Callable[[], str]) -> str:
    """Return `<Class: description>`, on one line of at most MOST_CHARACTERS.

    Args:
      thing: the object.
      describe: returns the description. It must not communicate or read files. If it
        raises, as for an object whose `__init__` has not run, only the class is shown.
    """
    name = type(thing).__name__
    try:
        text = " ".join(describe().split())
    except Exception:
        return f"<{name}>"
    most = MOST_CHARACTERS - len(name) - len("<: >")
    if len(text) > most:
        text = f"{text[: most - 3]}..."
    return f"<{name}: {text}>"


def html_table(title: str, rows: Iterable[tuple[str, object]], note: str = "") -> str:
    """Return the table of names and values that notebooks show for an object.

    Args:
      title: stands above it.
      rows: name and value of each.
      note: stands below it.
    """
    from html import escape  # used in notebooks only

    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>"
        for name, value in rows
    )
    below = f"<p>{escape(note)}</p>" if note else ""
    caption = f"<caption>{escape(title)}</caption>"
    return f"<div><table>{caption}<tbody>{cells}</tbody></table>{below}</div>"


def printable(text: str, kept: str = "") -> str:
    """Return text for a terminal: control characters, other than `kept`, are escaped.

    So are characters that change the direction of text, or are not valid Unicode.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c in kept or c.isprintable() else c.encode("unicode_escape").decode()
        for c in text
    )


def counted(number: int, word: str, plural: str = "") -> str:
    """Return a number with its noun: `1 row`, `1,000 rows`, `4 batches`."""
    return f"{number:,} {word if number == 1 else plural or word + 's'}"


def duration(seconds: float) -> str:
    """Return a duration as text with three digits and a unit, such as "1.25 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
