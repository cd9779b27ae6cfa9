"""The examples in docstrings, run on all ranks."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pytest

__all__ = ["check", "examples", "run"]

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.FAIL_FAST


class _OfFirstRank(doctest.OutputChecker):
    """Compares what rank 0 prints. Elsewhere any output will do, but no exception."""

    def __init__(self, rank: int):
        self.rank = rank

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return self.rank > 0 or super().check_output(want, got, optionflags)


def examples(module: ModuleType, names: Iterable[str]) -> dict[str, doctest.DocTest]:
    """Return the doctests of names and of their methods, by qualified name."""
    found = {}
    finder = doctest.DocTestFinder()
    values = {name: getattr(module, name) for name in names}
    for name, value in values.items():
        # Those that are inherited from a class which is not public itself, too
        bases = value.__mro__ if inspect.isclass(value) else (value,)
        public = [other for other in values.values() if other is not value]
        for base in reversed([b for b in bases if b not in public]):
            if not base.__module__.startswith("mpidist"):
                continue
            for test in finder.find(base, name, globs={}):
                is_public = not any(p.startswith("_") for p in test.name.split("."))
                if test.examples and is_public:
                    found[test.name] = test
    return found


def run(test: doctest.DocTest, globs: dict[str, Any], rank: int) -> str:
    """Return the report of what failed, empty if nothing did."""
    report: list[str] = []
    test = doctest.DocTest(
        test.examples, globs, test.name, test.filename, test.lineno, test.docstring
    )
    runner = doctest.DocTestRunner(
        _OfFirstRank(rank), verbose=False, optionflags=_FLAGS
    )
    results = runner.run(test, out=report.append, clear_globs=False)
    assert bool(results.failed) == bool(report)
    return "".join(report)


def check(test: doctest.DocTest, globs: dict[str, Any], comm: Any) -> None:
    """Require that an example is true, which shows what 2 replicas print."""
    if comm.size > 2:
        pytest.skip("the examples show what 2 replicas print")
    report = run(test, globs, comm.rank)
    assert not report, report
