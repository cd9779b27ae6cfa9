"""Random programs of the models in tests/fuzz, and those that failed once."""

import sys
from pathlib import Path

import launching
import pytest

FUZZ = Path(__file__).with_name("fuzz")
SUPPORT = str(FUZZ.with_name("support"))


@pytest.mark.parametrize("model", ["rows", "states"])
@pytest.mark.parametrize(
    ("ranks", "count"),
    [(2, 6), *(pytest.param(n, 20, marks=pytest.mark.slow) for n in (1, 2, 3))],
)
def test_random_programs(mpirun, model, ranks, count):
    """The same ones each time: tests/fuzz/run draws others."""
    job = str(FUZZ / "job.py")
    mpirun(ranks, job, model, "--count", str(count), PYTHONPATH=SUPPORT)


@pytest.mark.slow
def test_programs_that_failed_once():
    found = launching.run([sys.executable, str(FUZZ / "run"), "--found"])
    assert found.returncode == 0, found.stdout + found.stderr
