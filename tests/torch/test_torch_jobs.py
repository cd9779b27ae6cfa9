"""The jobs that train a network of PyTorch, and the benchmark beside torch's DDP."""

import difflib
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "jobs"
JOB, SINGLE = str(JOBS / "train_torch.py"), str(JOBS / "train_torch_single.py")
FEW = ["--shifts=0", "--epochs=3"]


@pytest.mark.parametrize(
    "ranks", [(1, 2), pytest.param((1, 2, 3, 4), marks=pytest.mark.slow)]
)
def test_any_number_of_ranks_ends_with_the_same_loss(mpirun, tmp_path, ranks):
    """As the script for one process does."""
    data = f"--data-dir={tmp_path}"
    runs = [mpirun(1, SINGLE, data, *FEW)]
    for n in ranks:
        folder = f"--checkpoint-dir={tmp_path / str(n)}"
        runs.append(mpirun(n, JOB, data, folder, *FEW))
    losses, accuracies = zip(*(run.stdout.split()[-2:] for run in runs), strict=True)
    losses = [float(loss.removeprefix("loss=")) for loss in losses]
    assert losses == pytest.approx([losses[0]] * len(runs), rel=1e-5)
    assert len({*accuracies}) == 1


STOPPED = """
import os, signal, sys
import torch
import train_torch

steps = 0
step = torch.optim.SGD.step

def stop(optimizer, *arguments):
    global steps
    steps += 1
    if steps == 5:  # in the middle of the first epoch
        os.kill(os.getpid(), signal.SIGTERM)
    return step(optimizer, *arguments)

if os.environ.get("STOP"):
    torch.optim.SGD.step = stop
train_torch.main(sys.argv[1:])
"""


def test_a_job_that_is_stopped_goes_on_in_the_middle_of_an_epoch(mpirun, tmp_path):
    data = f"--data-dir={tmp_path}"
    whole = mpirun(2, JOB, data, f"--checkpoint-dir={tmp_path / 'whole'}", *FEW)
    arguments = [data, f"--checkpoint-dir={tmp_path / 'parts'}", *FEW]
    paths = {"PYTHONPATH": f"{JOBS}:{ROOT}"}
    ended = mpirun(2, STOPPED, *arguments, STOP="1", **paths, fails=True)
    assert ended.returncode == 99, ended.stderr
    ended = mpirun(2, STOPPED, *arguments, **paths)
    assert ended.stdout.split()[-2:] == whole.stdout.split()[-2:]


# Not in the process of the tests: gloo's threads may wait for ever for Python's lock
# when a model of torch's DDP is deleted
BITS = """
import datetime, os, sys
import numpy as np
import torch
from mpi4py import MPI
from torch import nn
import mpidist
from mpidist.torch import DistributedDataParallel

comm = MPI.COMM_WORLD
torch.distributed.init_process_group(
    "gloo",
    store=torch.distributed.FileStore(sys.argv[1], comm.size),
    rank=comm.rank,
    world_size=comm.size,
    timeout=datetime.timedelta(seconds=60),
)

def train(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 3000), nn.Tanh(), nn.Linear(3000, 3))
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    random = np.random.default_rng(comm.rank)
    for step in range(5):
        x = torch.from_numpy(random.normal(size=(8, 6)).astype("f4"))
        y = torch.from_numpy(random.integers(0, 3, 8))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model

ours = train(DistributedDataParallel)
theirs = train(nn.parallel.DistributedDataParallel)
same = ours.state_dict().keys() == theirs.state_dict().keys()
for a, b in zip(ours.parameters(), theirs.parameters()):
    same = same and torch.equal(a, b)
if comm.allreduce(same, MPI.LAND) and comm.rank == 0:
    print("the same bits", flush=True)
comm.Barrier()
MPI.Finalize()
os._exit(0)
"""


@pytest.mark.slow
def test_weights_have_the_bits_of_torchs(mpirun, tmp_path):
    ended = mpirun(2, BITS, str(tmp_path / "store"))
    assert "the same bits" in ended.stdout, ended.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/frameworks.md", "docs/index.md"])
def test_the_scripts_of_the_manual(comm, capsys, mpi_tmp_path, monkeypatch, page):
    monkeypatch.chdir(mpi_tmp_path)
    scripts = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S
    )
    names = {}
    others = "import mpidist.jax", "import mpidist.keras"
    for script in [s for s in scripts if not any(other in s for other in others)]:
        exec(compile(script, page, "exec"), names)
    assert next(names["model"].parameters()).grad is not None
    out = capsys.readouterr().out
    assert ("loss=" in out) == (comm.rank == 0)
    names["strategy"].experimental_finalize()


def test_many_ranks_and_checkpoints_take_twenty_lines_more_at_most():
    single, many = (Path(path).read_text().splitlines() for path in (SINGLE, JOB))
    assert len(many) - len(single) <= 20
    lines = difflib.ndiff(single, many)
    same = sum(line.startswith("  ") for line in lines)
    assert same > len(single) / 2


@pytest.mark.slow
def test_the_benchmark_compares_weights_and_times(comm, mpirun, tmp_path):
    output = tmp_path / "frameworks.json"
    script = str(ROOT / "benchmarks" / "bench_frameworks.py")
    mpirun(comm.size, script, "--tiny", f"--output={output}")
    if comm.rank == 0:
        result = json.loads(output.read_text())
        assert len(result["comparisons"]) == 18
        assert max(result["differences"].values()) < 1e-5
