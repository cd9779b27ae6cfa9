"""The examples of mpidist.keras, of the manual's page, and the jobs."""

import difflib
import re
from pathlib import Path

import doctests
import numpy as np
import pytest

import mpidist

keras = pytest.importorskip("keras")
import mpidist.keras  # noqa: E402

ROOT = Path(__file__).parents[2]
JOB, SINGLE = (ROOT / "jobs" / f"train_keras{end}.py" for end in ("", "_single"))
EXAMPLES = doctests.examples(mpidist.keras, mpidist.keras.__all__)


def test_every_name_has_an_example():
    assert set(mpidist.keras.__all__) <= set(EXAMPLES)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example(comm, name, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    globs = {"np": np, "mpidist": mpidist, "strategy": strategy, "keras": keras}
    doctests.check(EXAMPLES[name], globs, comm)
    strategy.experimental_finalize()


def test_the_script_of_the_manual(comm, capsys):
    page = (ROOT / "docs/frameworks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (script,) = [block for block in blocks if "import mpidist.keras" in block]
    names = {}
    exec(compile(script, "frameworks.md", "exec"), names)
    assert ("loss=" in capsys.readouterr().out) == (comm.rank == 0)
    assert names["outputs"].shape == (10, 1)
    names["strategy"].experimental_finalize()


# It is told to end in the middle of the second epoch, by a signal of its own
STOPPED = """
import os, signal, sys
import train_keras
import keras

count = 0
on_train_batch_end = train_keras.mpidist.keras.Resume.on_train_batch_end

def stop(self, batch, logs=None):
    global count
    count += 1
    if count == 17:
        os.kill(os.getpid(), signal.SIGTERM)
    on_train_batch_end(self, batch, logs)

train_keras.mpidist.keras.Resume.on_train_batch_end = stop
train_keras.main(sys.argv[1:])
"""


def test_the_jobs_end_with_one_loss_and_go_on_where_they_were_stopped(mpirun, tmp_path):
    few = [f"--data-dir={tmp_path}", "--shifts=0", "--epochs=2"]
    whole = mpirun(1, str(SINGLE), *few).stdout.split()[-2:]
    few.append(f"--checkpoint-dir={tmp_path / 'parts'}")
    paths = {"PYTHONPATH": f"{ROOT / 'jobs'}:{ROOT}"}
    ended = mpirun(2, STOPPED, *few, **paths, fails=True)
    assert ended.returncode == 99, ended.stderr
    parts = mpirun(3, str(JOB), *few).stdout.split()[-2:]
    losses = [float(found[0].removeprefix("loss=")) for found in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert parts[1] == whole[1]


def test_many_ranks_and_checkpoints_take_few_lines():
    single, many = (path.read_text().splitlines() for path in (SINGLE, JOB))
    assert len(many) - len(single) <= 10
    same = sum(line.startswith("  ") for line in difflib.ndiff(single, many))
    assert same > len(single) / 2
