"""Comments: rooms whose code is hard to follow say why it is as it is."""

from pathlib import Path

import comments
import pytest

import mpidist

ROOT = Path(mpidist.__file__).parent
# Comments per 100 lines of code, docstrings not counted
LEAST = {"comm": 7, "data": 7, "checkpoint": 7}


@pytest.mark.parametrize("room", LEAST)
def test_a_reader_finds_comments(room):
    assert comments.density(ROOT / room) >= LEAST[room]


def test_comments_are_counted_and_docstrings_are_not():
    text = (
        '"""Docstring.\n\nMore # of it.\n"""\n\n'
        "# one\n"
        "x = 1  # two\n"
        "def f():\n"
        '    """Docstring."""\n'
        "    # three\n"
        '    return """text # of\nthe program"""  # noqa: D1\n'
    )
    assert comments.count(text) == (3, 4)
