"""How far a call's way through the library is: ceilings, with a little room."""

import re
from pathlib import Path

import pytest
from launching import is_open_mpi

import mpidist

ROOT = Path(mpidist.__file__).parents[1]
# Files, functions and exchanges on two ranks of one node, the first time and again
WAYS = {
    "small, first": (22, 72, 1),
    "small, again": (12, 27, 1),
    "large, first": (26, 88, 1),
    "large, again": (15, 39, 1),
    "assign, first": (24, 93, 2),
    "assign, again": (15, 49, 2),
    "row, first": (22, 124, 1),
    "row, again": (6, 19, 0),
    "save, first": (20, 123, 3),
    "save, again": (20, 124, 3),
    "strategy, again": (41, 154, 0),
}


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
