"""The table of TensorFlow's names in the manual, and what is true of them.

`tensorflow_signatures.json` has the signatures of TensorFlow 2.21's public classes that
have a counterpart here, as `inspect.signature` tells them, and the names of their
properties and members as "values"; `docs/tensorflow.md` says of
each member whether it is the same here, differs, or is absent, and why.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import mpidist

PAGE = Path(__file__).parents[2] / "docs" / "tensorflow.md"
SIGNATURES = Path(__file__).with_name("tensorflow_signatures.json")
_STARS = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


class Section(NamedTuple):
    """What the page says of one class.

    Args:
      here: the name in mpidist.
      same: members that are the same.
      rows: of the others, the signature or names there, and what is here.
    """

    here: str
    same: list[str]
    rows: list[tuple[str, str]]


def theirs() -> dict[str, Any]:
    """Return TensorFlow's signatures, by class and member, or of a function."""
    found: dict[str, Any] = json.loads(SIGNATURES.read_text())["signatures"]
    for members in found.values():
        if isinstance(members, dict):
            members |= dict.fromkeys(members.pop("values", "").split(), "value")
    return found


def without_counterpart() -> list[str]:
    """Return the other public names of tf.distribute."""
    found: list[str] = json.loads(SIGNATURES.read_text())["without counterpart"]
    return found


def text_of(member: Any) -> str:
    """Return the signature of a function, as in the file of TensorFlow's."""
    parts, is_keyword = [], False
    for parameter in inspect.signature(member).parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            parts.append("*")
            is_keyword = True
        is_keyword = is_keyword or parameter.kind is parameter.VAR_POSITIONAL
        default = ""
        if parameter.default is not parameter.empty:
            default = f"={parameter.default!r}"
            default = "=..." if "<" in default or " at " in default else default
        parts.append(f"{_STARS.get(parameter.kind, '')}{parameter.name}{default}")
    return f"({', '.join(parts)})"


def ours(here: str, member: str) -> str | None:
    """Return the signature of a member here, "value" of another one; None without."""
    cls = getattr(mpidist, here)
    if not hasattr(cls, member):
        is_field = member in getattr(cls, "__dataclass_fields__", {})
        return "value" if is_field else None
    found = getattr(cls, member)
    is_function = callable(found) and not inspect.isclass(found)
    return text_of(found) if is_function or member == "__init__" else "value"


def is_same(there: str, here: str | None) -> bool:
    """Return whether code that is written for the one signature fits the other."""
    return there == here


def read_page() -> dict[str, Section]:
    """Return what the page says, by TensorFlow's name of a class."""
    sections = {}
    for part in PAGE.read_text().split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        match = re.fullmatch(r"`(\S+)`: `(\w+)`", title)
        if match is None:
            continue
        same = re.search(r"^Same: (.*?)\.$", body, re.DOTALL | re.MULTILINE)
        rows = re.findall(r"^\| (.+?) \| (.+?) \|$", body, re.MULTILINE)
        sections[match[1]] = Section(
            match[2],
            re.findall(r"`([^`]+)`", same[1]) if same else [],
            [row for row in rows if row[0] != "in TensorFlow"],
        )
    return sections
