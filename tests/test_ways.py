"""How far a call's way through the library is: these numbers may only get smaller."""

import re
from pathlib import Path

import pytest
from launching import is_open_mpi

import mpidist

ROOT = Path(mpidist.__file__).parents[1]
# Files, functions and exchanges on two ranks of one node, the first time and again
WAYS = {
    "small, first": (21, 67, 1),
    "small, again": (11, 26, 1),
    "large, first": (25, 82, 1),
    "large, again": (14, 37, 1),
    "assign, first": (23, 88, 2),
    "assign, again": (14, 46, 2),
    "row, first": (21, 118, 1),
    "row, again": (6, 19, 0),
    "save, first": (20, 117, 3),
    "save, again": (20, 119, 3),
    "strategy, again": (40, 149, 0),
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
