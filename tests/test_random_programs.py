"""Random programs of the models in tests/fuzz, and those that failed once."""

import sys
from pathlib import Path

import launching
import pytest

FUZZ = Path(__file__).with_name("fuzz")
SUPPORT = str(FUZZ.with_name("support"))


@pytest.mark.parametrize("model", ["rows", "states"])
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_random_programs(mpirun, model, ranks):
    """The same seeds each time: tests/fuzz/run draws others."""
    job = str(FUZZ / "job.py")
    mpirun(ranks, job, model, "--seconds", "15", PYTHONPATH=SUPPORT)


@pytest.mark.slow
def test_programs_that_failed_once():
    found = launching.run([sys.executable, str(FUZZ / "run"), "--found"])
    assert found.returncode == 0, found.stdout + found.stderr
