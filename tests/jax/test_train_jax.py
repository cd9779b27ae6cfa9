"""The JAX jobs: the same on any number of ranks, resumed exactly, ten lines more."""

import re
from pathlib import Path

import pytest

pytest.importorskip("jax")

JOBS = Path(__file__).parents[2] / "jobs"


def run(mpirun, ranks, script, folder, name, *more):
    folders = f"--data-dir={folder / 'data'}", f"--checkpoint-dir={folder / name}"
    ended = mpirun(ranks, str(JOBS / script), *folders, *more)
    return ended.stdout


def test_the_distributed_job_has_few_lines_more():
    lines = [
        len((JOBS / name).read_text().splitlines())
        for name in ("train_jax_single.py", "train_jax.py")
    ]
    assert lines[1] - lines[0] <= 10


def test_any_number_of_ranks_gives_the_same_loss(mpirun, tmp_path):
    """And a job that is resumed, on another number of ranks, goes on as it would."""
    ways = [(1, "train_jax_single.py"), (2, "train_jax.py"), (3, "train_jax.py")]
    outs = [
        run(mpirun, n, script, tmp_path, str(i), "--epochs=2", "--batch-size=479")
        for i, (n, script) in enumerate(ways)
    ]
    found = [re.match(r"loss=(\S+) accuracy=(\S+)", out).groups() for out in outs]
    for loss, accuracy in found:
        assert float(loss) == pytest.approx(float(found[0][0]), rel=2e-5)
        assert float(accuracy) == pytest.approx(float(found[0][1]), abs=0.003)


def test_a_job_that_ends_in_the_middle_goes_on_exactly(mpirun, tmp_path):
    more = "--epochs=2", "--batch-size=479"
    expected = run(mpirun, 2, "train_jax.py", tmp_path, "whole", *more)
    # It is told to end after two steps, by a signal of its own, and exits with 99
    script = (
        "import os, runpy, signal, sys\n"
        "import mpidist, mpidist.jax\n"
        "make, count = mpidist.jax.JaxIterator.__next__, [0]\n"
        "def count_steps(self):\n"
        "    count[0] += 1\n"
        "    if count[0] == 2:\n"
        "        os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    return make(self)\n"
        "mpidist.jax.JaxIterator.__next__ = count_steps\n"
        f"sys.path.insert(0, {str(JOBS)!r})\n"
        f"runpy.run_path({str(JOBS / 'train_jax.py')!r}, run_name='__main__')\n"
    )
    folders = f"--data-dir={tmp_path / 'data'}", f"--checkpoint-dir={tmp_path / 'cut'}"
    ended = mpirun(2, script, *folders, *more, fails=True)
    assert ended.returncode == 99, ended.stderr
    assert run(mpirun, 2, "train_jax.py", tmp_path, "cut", *more) == expected
