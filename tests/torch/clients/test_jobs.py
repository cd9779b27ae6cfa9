"""Whole jobs: checkpoints between numbers of ranks, and failures of one rank."""

import pytest

pytest.importorskip("torch")

BEGIN = """
import os, sys, warnings
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import mpidist.torch
torch.set_num_threads(1)
dist.init_process_group("mpidist")
rank, ranks = dist.get_rank(), dist.get_world_size()
def net():
    torch.manual_seed(0)
    layers = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)
    return torch.nn.Sequential(*layers).double()
"""
SAVE = (
    BEGIN
    + """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
model = net()
mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
def step():
    optimizer.zero_grad()
    model(torch.ones(2, 5).double()).square().sum().backward()
    optimizer.step()
    total = sum(p.detach().full_tensor().double().sum() for p in model.parameters())
    return f"{total.item():.8f}"
step()
path, is_first = sys.argv[1], ranks == 3
def states():
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
if is_first:
    dcp.save(states(), checkpoint_id=path)
else:
    step()  # somewhere else
    found = states()
    dcp.load(found, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=found["model"],
                   optim_state_dict=found["optimizer"])
if rank == 0:
    print("next", step())
else:
    step()
dist.destroy_process_group()
"""
)


def test_a_checkpoint_of_three_ranks_is_read_by_two(mpirun, tmp_path):
    written = mpirun(3, SAVE, str(tmp_path / "checkpoint"))
    read = mpirun(2, SAVE, str(tmp_path / "checkpoint"))
    assert "next" in written.stdout
    assert read.stdout == written.stdout


# What one rank does in the middle of a training step, and what the job says
FAILURES = {
    "raises": ("raise ArithmeticError('rank 1 failed')", "rank 1 failed"),
    "exits": ("sys.exit(3)", "."),
    "ends": ("os._exit(3)", "."),
    "calls something else": ("dist.barrier()", "barrier"),
}


@pytest.mark.parametrize(
    ("failure", "ranks"), [("raises", 3), *((name, 2) for name in FAILURES)]
)
def test_a_failure_of_one_rank_ends_the_job(mpirun, failure, ranks):
    action, message = FAILURES[failure]
    script = (
        BEGIN
        + f"""
model = torch.nn.parallel.DistributedDataParallel(net())
for step in range(3):
    loss = model(torch.ones(2, 5).double()).sum()
    if step == 1 and rank == 1:
        {action}
    loss.backward()
print("not here")
"""
    )
    done = mpirun(ranks, script, fails=True)
    assert "not here" not in done.stdout
    assert message == "." or message in done.stderr


def test_a_failure_in_lightnings_trainer_ends_the_job(mpirun, tmp_path):
    pytest.importorskip("lightning")
    script = """
import warnings
warnings.simplefilter("ignore")
import lightning, torch
from lightning.pytorch.strategies import DDPStrategy
import mpidist.torch
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(5, 1)
    def training_step(self, batch, index):
        if self.global_rank == 1 and index == 1:
            raise ArithmeticError("rank 1 failed")
        return self.net(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
lightning.Trainer(
    accelerator="cpu", devices=2, max_epochs=1, logger=False,
    strategy=DDPStrategy(process_group_backend="mpidist"),
    enable_checkpointing=False, enable_progress_bar=False,
).fit(Model(), torch.utils.data.DataLoader(torch.ones(24, 5), batch_size=2))
print("not here")
"""
    done = mpirun(2, script, fails=True)
    assert "not here" not in done.stdout
    assert "rank 1 failed" in done.stderr


def test_large_objects_and_children(mpirun):
    script = (
        BEGIN
        + """
import multiprocessing
def child(_):
    return torch.ones(3).sum().item()
big = {"rank": rank, "bytes": os.urandom(1 << 20) * 40}
found = [None] * ranks
dist.all_gather_object(found, big)
assert [len(f["bytes"]) for f in found] == [40 << 20] * ranks
assert [f["rank"] for f in found] == list(range(ranks))
sizes = [len(big["bytes"]) + rank if rank == 0 else 0]
dist.broadcast_object_list(sizes, 0)
assert sizes == [40 << 20]
with multiprocessing.get_context("fork").Pool(2) as pool:
    work_ = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert pool.map(child, range(2)) == [3.0, 3.0]
    work_.wait()
dist.barrier()
dist.destroy_process_group()
"""
    )
    for ranks in (2, 3):
        mpirun(ranks, script)
