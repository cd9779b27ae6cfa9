"""One-line reprs, of what is known without reading files; text for terminals."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["MOST_CHARACTERS", "counted", "one_line", "printable"]

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
