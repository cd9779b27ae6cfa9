"""Compare the public classes with the built pages of the reference.

    python tests/support/api_members.py docs/_build/html

What `dir()` shows of a class must be on its page, and fields of a dataclass, too. A
name may be missing only if the page's options exclude it, if Python, NumPy or PyTorch
define it, or if it is inherited from a class with an entry of its own: then the table
of the class shows it, or the entry names its base.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

__all__ = [
    "Entry",
    "entries",
    "main",
    "members",
    "missing",
    "names_without_table",
    "public_classes",
]

PAGES = Path(__file__).parents[2] / "docs" / "api"
# With so many members a class needs a table of them; a page needs one of its names
LONG_CLASS, LONG_PAGE = 6, 3


class Entry(NamedTuple):
    """What a page says of a class, beside what Sphinx finds."""

    page: str
    excluded: frozenset[str]
    shows_bases: bool
    table: frozenset[str]


def entries(folder: Path) -> dict[str, Entry]:
    """Return the entries of the classes on the pages in a folder."""
    found = {}
    for page in sorted(folder.glob("*.md")):
        for name, body in re.findall(
            r"^\.\. auto(?:class|exception):: (\S+)\n((?: {3}.*\n|\n)*)",
            page.read_text(),
            re.M,
        ):
            excluded = re.search(r"^   :exclude-members: (.*)$", body, re.M)
            found[name] = Entry(
                page.name,
                frozenset(excluded[1].split(", ") if excluded else ()),
                ":show-inheritance:" in body,
                frozenset(re.findall(r"^ {6}~\S*?(\w+)$", body, re.M)),
            )
    return found


def modules() -> list[ModuleType]:
    """Return the modules whose names are public, as far as they can be imported."""
    names = ["mpidist", "mpidist.statistics"]
    names += [f"mpidist.{n}" for n in ("torch", "jax") if importlib.util.find_spec(n)]
    return list(map(importlib.import_module, names))


def names_of(inventory: Path) -> set[str]:
    """Return the names in Sphinx's list of what is on the pages."""
    data = inventory.read_bytes()
    head = b"zlib.\n"
    lines = zlib.decompress(data[data.index(head) + len(head) :]).decode().splitlines()
    return {line.split()[0] for line in lines if " py:" in line}


def members(kind: type) -> dict[str, type]:
    """Return the public names of a class, each with the class that defines it."""
    names = {name for name in dir(kind) if not name.startswith("_")}
    if dataclasses.is_dataclass(kind):
        names |= {field.name for field in dataclasses.fields(kind)}
    result = {}
    for name in names:
        for owner in kind.__mro__:
            if name in vars(owner) or name in vars(owner).get("__annotations__", ()):
                result[name] = owner
                break
    return {n: owner for n, owner in result.items() if not n.startswith("_")}


def missing(
    name: str, kind: type, on_pages: set[str], described: dict[str, Entry]
) -> list[str]:
    """Return what is wrong with the entry of a class."""
    if name not in on_pages or name not in described:
        return [f"{name} has no entry"]
    entry, wrong, shown = described[name], [], set()
    names = {kind: name for name, kind in public_classes().items()}
    bases = [names[base] for base in kind.__mro__[1:] if names.get(base) in described]
    left_out = entry.excluded.union(*(described[base].excluded for base in bases))
    for member, owner in sorted(members(kind).items()):
        if not owner.__module__.startswith("mpidist") or member in left_out:
            continue
        shown.add(member)
        is_inherited = any(f"{base}.{member}" in on_pages for base in bases)
        is_named = is_inherited and (member in entry.table or entry.shows_bases)
        if f"{name}.{member}" not in on_pages and not is_named:
            wrong.append(f"{name}.{member} is not on {entry.page}")
    own = {member for member in shown if f"{name}.{member}" in on_pages}
    if entry.table or (len(own) > LONG_CLASS and not is_plain(kind)):
        where = f"the table of {name} on {entry.page}"
        wrong += [f"{where} lacks {member}" for member in sorted(own - entry.table)]
        wrong += [f"{where} has {member}" for member in sorted(entry.table - shown)]
    return wrong


def is_plain(kind: type) -> bool:
    """Return whether a class has values alone, which are short by themselves."""
    fields = dataclasses.is_dataclass(kind) or hasattr(kind, "__members__")
    return fields or hasattr(kind, "_fields")


def public_classes() -> dict[str, type]:
    """Return the public classes by their names."""
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules()
        for name in module.__all__
        if isinstance(getattr(module, name), type)
    }


def names_without_table(folder: Path) -> list[str]:
    """Return the names that the table on top of a long page lacks."""
    wrong = []
    for page in sorted(folder.glob("*.md")):
        text = page.read_text()
        directive = r"^\.\. auto(?:class|function):: (\S+)$"
        names = re.findall(directive, text, re.M)
        top = set(re.findall(r"^ {3}([\w.]+)$", text, re.M))
        if len(names) >= LONG_PAGE:
            wrong += [
                f"the table of {page.name} lacks {name}"
                for name in names
                if not {name, name.rpartition(".")[2]} & top
            ]
    return wrong


def main(folder: Path) -> int:
    """Print what is wrong; return 1 if anything is."""
    on_pages, described = names_of(folder / "objects.inv"), entries(PAGES)
    wrong = names_without_table(PAGES)
    for name, kind in public_classes().items():
        wrong += missing(name, kind, on_pages, described)
    print(*wrong, f"{len(described)} classes, {len(wrong)} wrong", sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
