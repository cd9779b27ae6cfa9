"""Each sentence of the manual that promises is listed with the tests that hold it."""

import ast
import functools
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
# A sentence with one of these promises
WORDS = [
    *("all ranks", "all replicas", "always", "any number of ranks", "at least"),
    *("at most", "cannot", "either", "every method", "every rank", "every replica"),
    *("exact", "exactly", "however", "identically", "never", "no rank", "no row"),
    *("no rows", "none", "nothing", "once", "unchanged", "whatever", "whichever"),
]
PROMISE = re.compile(rf"\b({'|'.join(WORDS)})\b")
PAGES = {"README.md"} | {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
PAGES -= {"docs/performance.md"}  # figures that were measured
# Of each page: how a sentence begins, and its test, or several; none if it promises
# nothing, but says what the reader has to do, or what something is
TABLE = yaml.safe_load((ROOT / "tests/promises.yaml").read_text())


def sentences(text):
    """Yield the sentences of a page, those in tables too, without scripts."""
    text = re.sub(r"^(`{3,}).*?^\1\s*$", "\n", text, flags=re.M | re.S)
    text = re.sub(r"!\[.*?\]\([^)]*\)", "", text, flags=re.S)
    for part in re.split(r"\n\s*\n|\n(?=#)|\n\s*(?=- |\|)|\n\s*\d\. ", text):
        part = " ".join(part.split()).removeprefix("- ").removeprefix("| ")
        yield from re.split(r"(?<=[.!?:])\s+(?=[A-Z`*(\[])", part)


def promises(page):
    text = (ROOT / page).read_text()
    found = [s for s in sentences(text) if PROMISE.search(s[:1].lower() + s[1:])]
    if page == "docs/tensorflow.md":  # test_tensorflow_table.py compares its tables
        found = [s for s in found if "|" not in s]
    return [s for s in found if not s.startswith("#")]


@functools.cache
def names_in(path):
    """Return the names of the tests of a file, without importing it."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        names |= {prefix + n.name for n in inside if isinstance(n, ast.FunctionDef)}
    return names


def test_the_table_has_pages_that_there_are():
    assert set(TABLE) <= PAGES


@pytest.mark.parametrize("page", sorted(PAGES))
def test_each_promise_is_listed(page):
    listed, found = TABLE.get(page, {}), promises(page)
    for text in found:
        assert sum(map(text.startswith, listed)) == 1, f"{page}: {text}"
    for start in listed:
        here = [text for text in found if text.startswith(start)]
        assert len(here) == 1, f"{page} has {len(here)} promises like: {start}"


@pytest.mark.parametrize("page", sorted(TABLE))
def test_the_tests_that_are_listed_exist(page):
    for start, tests in TABLE[page].items():
        for test in [tests] if isinstance(tests, str) else tests or []:
            path, _, name = test.partition("::")
            assert (ROOT / path).exists(), f"{page}: {start}: there is no {path}"
            assert name in names_in(path), f"{page}: {start}: there is no {test}"
