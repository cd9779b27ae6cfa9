"""The manual: every public name has an example, and every example is true."""

import ast
import doctest
import inspect
import os
import pydoc
import re
import textwrap
from pathlib import Path
from unittest import mock

import doctests
import numpy as np
import pytest

import mpidist

# Methods that must have an example too
METHODS = {
    "CrossDeviceOps": "batch_reduce broadcast reduce",
    "Dataset": "enumerate filter interleave reduce unbatch zip",
    "DistributedDataset": "reduce",
    "ReplicaContext": "all_gather all_reduce merge_call",
    "Strategy": "experimental_distribute_values_from_function "
    "experimental_local_results gather reduce run scope",
    "StrategyExtended": "audit_variables batch_reduce_to reduce_to update",
    "Variable": "assign assign_add scatter_add",
}


def is_exception(value):
    return inspect.isclass(value) and issubclass(value, BaseException)


def is_documented(value):
    return inspect.isclass(value) or inspect.isroutine(value)


NAMES = [n for n in mpidist.__all__ if n != "__version__"]
DOCUMENTED = [name for name in NAMES if is_documented(getattr(mpidist, name))]


EXAMPLES = doctests.examples(mpidist, DOCUMENTED)


def script_of_the_front_page():
    """Return the code block of the package's docstring."""
    manual = inspect.getdoc(mpidist)
    _, _, after = manual.partition("A complete script")
    block = after.partition("::\n\n")[2]
    lines = []
    for line in block.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip() + "\n"


@pytest.mark.parametrize(
    "name",
    [*DOCUMENTED, *(f"{k}.{name}" for k in METHODS for name in METHODS[k].split())],
)
def test_every_public_name_has_an_example(name):
    assert name in EXAMPLES


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example(strategy, comm, name, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)  # for those that write files
    globs = {"np": np, "mpidist": mpidist, "strategy": strategy}
    with mock.patch.dict(os.environ):  # for those that set variables
        doctests.check(EXAMPLES[name], globs, comm)
    assert not mpidist.has_strategy()
    for value in globs.values():
        if isinstance(value, mpidist.Strategy) and value is not strategy:
            value.experimental_finalize()


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_output_fails_on_rank_0_and_exceptions_on_all(rank):
    parser = doctest.DocTestParser()
    wrong = parser.get_doctest(">>> 1\n2\n", {}, "wrong", None, 0)
    assert bool(doctests.run(wrong, {}, rank)) == (rank == 0)
    raising = parser.get_doctest(">>> 1 / 0\n2\n", {}, "raising", None, 0)
    assert "ZeroDivisionError" in doctests.run(raising, {}, rank)


def test_the_front_page_lists_every_name():
    table = inspect.getdoc(mpidist).partition("\nNames\n=====\n")[2]
    listed = set(re.findall(r"\w+", table))
    assert [
        name
        for name in NAMES
        if not is_exception(getattr(mpidist, name)) and name not in listed
    ] == []


def test_the_front_page_is_no_wider_than_a_terminal():
    for line in inspect.getdoc(mpidist).splitlines():
        assert len(line) <= 88, line


def test_help_is_the_front_page():
    """And not 7,000 lines of inherited methods behind it."""
    text = pydoc.plaintext.document(mpidist)
    assert len(text.splitlines()) < len(inspect.getdoc(mpidist).splitlines()) + 50
    for line in inspect.getdoc(mpidist).splitlines():
        assert line in text
    assert set(mpidist.__all__) <= set(dir(mpidist))
    assert "shuffle" in pydoc.plaintext.document(mpidist.Dataset)


def test_the_script_of_the_front_page_runs(mpirun):
    script = script_of_the_front_page()
    statements = [line for line in script.splitlines() if line.strip()]
    assert len(statements) <= 20
    assert ast.parse(script).body
    outputs = {mpirun(ranks, script).stdout for ranks in (1, 2)}
    assert len(outputs) == 1
    assert outputs.pop().startswith("w = [")


def test_the_references_own_examples(strategy, comm):
    page = Path(__file__).parents[1] / "docs" / "api" / "datasets.md"
    text = page.read_text().partition(".. py:data::")[2].partition("```")[0]
    test = doctest.DocTestParser().get_doctest(text, {}, "api", None, 0)
    assert len(test.examples) == 3
    doctests.check(test, {"mpidist": mpidist, "strategy": strategy}, comm)
