"""Models of PyTorch that are trained by `mpidist.torch` and by torch's own DDP."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import mpidist
from mpidist.torch import DistributedDataParallel

__all__ = ["CASES", "Case", "Trainer", "contestants", "gloo", "narrow_trainer"]


class Case(NamedTuple):
    """What is trained.

    Args:
      name: for tables.
      make: returns the model.
      shape: of a row.
      rows: of each rank, in a step.
      steps: in each turn.
      target: what ours has to reach by DDP's; samples per second, or a step's time.
      is_time: which of them.
    """

    name: str
    make: Callable[[], Any]
    shape: tuple[int, ...]
    rows: int
    steps: int
    target: float
    is_time: bool = False


def mlp(*sizes: int) -> Any:
    """Return layers of these sizes, with rectified units between them."""
    layers: list[Any] = []
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Two convolutions, and what they add to."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short: Any = nn.Identity()
        if stride > 1 or before != after:
            self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.short(x))


def resnet() -> Any:
    """Return a ResNet of 14 layers for images of 32x32 pixels."""
    sizes = [(16, 16, 1)] * 2 + [(16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1)]
    blocks = [Block(*size) for size in sizes]
    first = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*first, *blocks, *last)


CASES = {
    "mlp": Case(
        "MLP of 10 M parameters",
        lambda: mlp(784, 2048, 2048, 2048, 10),
        (784,),
        32,
        10,
        1.3,
    ),
    "small": Case(
        "MLP 64-128-10", lambda: mlp(64, 128, 10), (64,), 64, 200, 0.3, is_time=True
    ),
    "resnet": Case("ResNet, 8 images of 32x32", resnet, (3, 32, 32), 8, 10, 1.15),
}


class Trainer:
    """Trains one model, with batches that lie ready."""

    def __init__(self, case: Case, rank: int, wrap: Callable[[Any], Any]):
        torch.manual_seed(0)
        self.model = wrap(case.make())
        parameters = self.model.parameters()
        self._optimizer = torch.optim.SGD(parameters, 0.01, momentum=0.9)
        random = np.random.default_rng(rank)
        x = random.normal(size=(case.rows, *case.shape)).astype("f4")
        self._x = torch.from_numpy(x)
        self._y = torch.from_numpy(random.integers(0, 10, case.rows))

    def train(self, steps: int) -> None:
        """Make so many steps."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(self._x), self._y).backward()
            self._optimizer.step()

    def weights(self) -> list[Any]:
        """Return the parameters."""
        return [p.detach() for p in self.model.parameters()]


@contextlib.contextmanager
def gloo(comm: MPI.Intracomm, shared: str | None = None) -> Iterator[None]:
    """Let torch's DDP communicate in the block. Collective.

    Args:
      comm: the ranks.
      shared: a folder that all of them see; None for that of temporary files.
    """
    with tempfile.TemporaryDirectory(dir=shared) as own:
        folder = comm.bcast(own)
        torch.distributed.init_process_group(
            "gloo",
            store=torch.distributed.FileStore(f"{folder}/store", comm.size),
            rank=comm.rank,
            world_size=comm.size,
            timeout=datetime.timedelta(seconds=60),
        )
        try:
            yield
        finally:
            comm.Barrier()
            torch.distributed.destroy_process_group()
            comm.Barrier()


def contestants(
    case: Case, comm: MPI.Intracomm, strategy: mpidist.Strategy
) -> dict[str, Trainer]:
    """Return who trains the same model. Collective; inside of `gloo`."""
    return {
        "mpidist": Trainer(
            case, comm.rank, lambda model: DistributedDataParallel(model, strategy)
        ),
        "torch DDP (gloo)": Trainer(
            case, comm.rank, nn.parallel.DistributedDataParallel
        ),
        "no communication": Trainer(case, comm.rank, lambda model: model),
    }


def bfloat16(state: Any, bucket: torch.distributed.GradBucket) -> Any:
    """Send gradients as bfloat16; PyTorch refuses its own hook but for NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


def narrow_trainer(
    case: Case, comm: MPI.Intracomm, strategy: mpidist.Strategy
) -> Trainer:
    """Return ours that sends gradients as bfloat16. Collective."""
    trainer = contestants(case, comm, strategy)["mpidist"]
    trainer.model.register_comm_hook(None, bfloat16)
    return trainer
