"""What `repr` says of an object: one line, of what is known without looking."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["MOST_CHARACTERS", "counted", "one_line"]

MOST_CHARACTERS = 120


def one_line(thing: object, describe: Callable[[], str]) -> str:
    """Return `<Class: description>`, on one line of at most MOST_CHARACTERS.

    Args:
      thing: whose class is named.
      describe: the description. It must not communicate, nor read a file. What it
        raises, as for an object that is not made yet, leaves the class alone.
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


def counted(number: int, word: str, plural: str = "") -> str:
    """Return a number of things: `1 row`, `1,000 rows`, `4 batches`."""
    return f"{number:,} {word if number == 1 else plural or word + 's'}"
