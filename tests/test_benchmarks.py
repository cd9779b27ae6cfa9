"""Benchmarks run; what they measure is not judged here."""

from __future__ import annotations

import sys
from pathlib import Path

import launching
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize(
    "command",
    [["bench_import.py", "--tries=1"], ["faults.py", "--tries=1", "--ranks=2"]],
    ids=lambda command: command[0],
)
def test_benchmarks_run(comm, command):
    if comm.rank == 0:
        script, *arguments = command
        ended = launching.run([sys.executable, str(BENCHMARKS / script), *arguments])
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout
