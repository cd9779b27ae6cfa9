"""Names of objects as names in HDF5, and as they read in messages."""

from __future__ import annotations

import re
import urllib.parse
from typing import Any

from mpidist import checks
from mpidist.errors import ArgumentError, ArgumentTypeError

__all__ = ["Path", "as_name", "escape", "readable", "unescape"]

Path = tuple[str, ...]  # the escaped names from the root on

# HDF5 takes "/" for the next group, and cannot have the others
_SPECIAL = re.compile(r"[%/\0\ud800-\udfff]")
_LONGEST = 1000


def escape(name: str) -> str:
    """Return a key of a dict as HDF5 may name it: unchanged, but for odd ones.

    Raises:
      ArgumentError: it is longer than 1000 characters.
    """
    if len(name) > _LONGEST:
        raise ArgumentError(
            f"the name {name[:40]!r}... has {len(name)} characters, more than "
            f"{_LONGEST}; shorten it"
        )
    if not name.strip("."):  # HDF5 leaves out "" and "."
        return "%" + "2E" * bool(name) + name[1:]
    return _SPECIAL.sub(lambda match: _percent(match[0]), name)


def unescape(name: str) -> str:
    """Return the key that `escape` made a name of."""
    if name == "%":
        return ""
    return urllib.parse.unquote(name, errors="surrogatepass")


def as_name(key: Any, path: Path) -> str:
    """Return the name of one key of the dict at `path`.

    Raises:
      ArgumentTypeError: it is neither a str nor an int.
    """
    if type(key) is str:
        return escape(key)
    if type(key) is int:
        return str(key)
    raise ArgumentTypeError(
        f"{readable(path)}: the key {checks.shown(key)} of a dict must be a str or an "
        "int"
    )


def readable(path: Path) -> str:
    """Return a path as messages show it."""
    return repr("/".join(map(unescape, path)))


def _percent(character: str) -> str:
    data = character.encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in data)
