"""How far a call's way through the library is: these numbers may only get smaller."""

import ast
import re
from pathlib import Path

import pytest
from launching import is_open_mpi

import mpidist

ROOT = Path(mpidist.__file__).parents[1]
# Files, functions and exchanges on two ranks of one node, the first time and again
WAYS = {
    "small, first": (21, 69, 1),
    "small, again": (12, 27, 1),
    "large, first": (25, 85, 1),
    "large, again": (15, 38, 1),
    "assign, first": (23, 91, 2),
    "assign, again": (15, 48, 2),
    "row, first": (22, 121, 1),
    "row, again": (6, 19, 0),
    "save, first": (20, 120, 3),
    "save, again": (20, 122, 3),
    "strategy, again": (41, 152, 0),
}
MODULES, LINES, ANY_IN_COMM = 203, 54718, 682


@pytest.mark.skipif(is_open_mpi(), reason="counted under MPICH")
def test_a_call_passes_few_functions(comm, mpirun):
    script = ROOT / "benchmarks" / "count_ways.py"
    done = mpirun(2, str(script))
    line = re.compile(
        r"^(.*): (\d+) files, (\d+) functions, \d+ calls, (-?\d+) ex", re.M
    )
    found = {name: tuple(map(int, rest)) for name, *rest in line.findall(done.stdout)}
    for name, most in WAYS.items():
        assert all(map(int.__le__, found[name], most)), (name, found[name], most)


def test_the_house_does_not_grow():
    files = list((ROOT / "mpidist").rglob("*.py"))
    assert len(files) <= MODULES
    assert sum(len(f.read_text().splitlines()) for f in files) <= LINES
    trees = [ast.parse(f.read_text()) for f in files if "comm" in f.parts]
    names = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Name)]
    assert sum(name.id == "Any" for name in names) <= ANY_IN_COMM
