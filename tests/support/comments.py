"""Count the comments of Python files: `python tests/support/comments.py FOLDER...`."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from pathlib import Path

# What is for tools, and not for readers
_DIRECTIVES = ("# type:", "# noqa", "# ruff:", "# pragma:", "# fmt:")


def count(text: str) -> tuple[int, int]:
    """Return how many comments and how many lines of code a text has.

    Comments on successive lines are as many as they have lines. Lines of code hold
    something else than a comment or a docstring.
    """
    comments = 0
    code: set[int] = set()
    ignored = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments += not token.string.startswith(_DIRECTIVES)
        elif token.type not in (*ignored, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            code -= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    return comments, len(code)


def density(folder: Path) -> float:
    """Return how many comments the files in a folder have per 100 lines of code."""
    counts = [count(path.read_text()) for path in sorted(folder.rglob("*.py"))]
    return 100 * sum(c for c, _ in counts) / sum(n for _, n in counts)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for path in sorted(Path(name).rglob("*.py")):
            comments, lines = count(path.read_text())
            if lines:
                share = 100 * comments / lines
                print(f"{share:5.1f} {comments:4} of {lines:4} {path}")
        print(f"{density(Path(name)):5.1f} per 100 lines of code in {name}")
