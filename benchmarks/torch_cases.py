"""Models of PyTorch, and who trains them."""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import mpidist
from mpidist.torch import DistributedDataParallel
from mpidist.torch.process_group import group_of

__all__ = [
    "ALONE",
    "CASES",
    "GLOO",
    "NARROW",
    "OURS",
    "OVER",
    "Case",
    "Trainer",
    "contestants",
    "gloo",
]

OURS, GLOO, ALONE = "mpidist", "torch DDP (gloo)", "no communication"
OVER, NARROW = "torch DDP (mpidist)", "mpidist, bfloat16"
FSDP_OVER, FSDP_GLOO = "FSDP2 (mpidist)", "FSDP2 (gloo)"


class Case(NamedTuple):
    """What is trained.

    Args:
      name: for tables.
      make: returns the model.
      shape: of a row.
      rows: of each rank, in a step.
      steps: in each turn.
      targets: what the first has to reach by the second; samples per second, or a
        step's time. None where it is only told. On nodes, those of `NARROW` alone.
      is_time: which of them.
    """

    name: str
    make: Callable[[], Any]
    shape: tuple[int, ...]
    rows: int
    steps: int
    targets: Mapping[tuple[str, str], float | None]
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


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.body = mlp(width, 4 * width, width)

    def forward(self, x: Any) -> Any:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.body(self.norms[1](x))


def transformer() -> Any:
    """Return four layers for sequences of rows of 256 numbers."""
    last = [nn.Flatten(), nn.Linear(16 * 256, 10)]
    return nn.Sequential(*[Layer(256) for _ in range(4)], *last)


def _beside(
    by_gloo: float | None, over_by_gloo: float | None, narrow: float | None = None
) -> dict[Any, Any]:
    """Return what is compared of models that are whole on each rank."""
    return {
        (OURS, GLOO): by_gloo,
        (OVER, GLOO): over_by_gloo,
        (OURS, OVER): None,
        (OURS, ALONE): None,
        (NARROW, GLOO): narrow,
    }


CASES = {
    "mlp": Case(
        "MLP of 10 M parameters",
        lambda: mlp(784, 2048, 2048, 2048, 10),
        (784,),
        32,
        10,
        _beside(None, 1.5, narrow=1.75),
    ),
    "deep": Case(
        "ten layers of 1000",
        lambda: mlp(*[1000] * 10, 10),
        (1000,),
        32,
        10,
        _beside(None, 1.5),
    ),
    "small": Case(
        "MLP 64-128-10",
        lambda: mlp(64, 128, 10),
        (64,),
        64,
        200,
        _beside(None, 0.4),
        is_time=True,
    ),
    "resnet": Case(
        "ResNet, 8 images of 32x32", resnet, (3, 32, 32), 8, 10, _beside(1.15, None)
    ),
    "fsdp": Case(
        "transformer of 4 layers",
        transformer,
        (16, 256),
        8,
        10,
        {(FSDP_OVER, FSDP_GLOO): 1.3, (FSDP_OVER, ALONE): None},
    ),
}


class Trainer:
    """Trains one model, with batches that lie ready."""

    def __init__(self, case: Case, rank: int, wrap: Callable[[Any], Any]):
        torch.manual_seed(0)
        self.model = wrap(case.make())
        self.parameters = list(self.model.parameters())
        self._optimizer = torch.optim.SGD(self.parameters, 0.01, momentum=0.9)
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
        """Return the parameters. Collective, if each rank has a part of them."""
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in self.parameters]
        return [p.detach() for p in whole]


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
    case: Case, comm: MPI.Intracomm, strategy: mpidist.Strategy, is_wire: bool
) -> dict[str, Trainer]:
    """Return who trains the same model. Collective; inside of `gloo`.

    Args:
      case: what is trained.
      comm: the ranks.
      strategy: of the same.
      is_wire: whether ranks are on nodes, so that one sends bfloat16.
    """
    group = group_of(strategy)
    torch_ddp = nn.parallel.DistributedDataParallel
    wraps: dict[str, Callable[[Any], Any]] = {
        OURS: lambda model: DistributedDataParallel(model, strategy),
        OVER: functools.partial(torch_ddp, process_group=group),
        GLOO: torch_ddp,
        ALONE: lambda model: model,
        FSDP_OVER: functools.partial(_shard, group=group),
        FSDP_GLOO: functools.partial(_shard, group=torch.distributed.group.WORLD),
    }
    if is_wire:
        wraps[NARROW] = lambda model: _narrow(DistributedDataParallel(model, strategy))
    named = set(itertools.chain(*case.targets))
    return {
        name: Trainer(case, comm.rank, wrap)
        for name, wrap in wraps.items()
        if name in named
    }


def _shard(model: Any, group: Any) -> Any:
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group(group, "cpu")
    for layer in model:
        if isinstance(layer, Layer):
            fsdp.fully_shard(layer, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def _narrow(model: Any) -> Any:
    """Send gradients as bfloat16."""
    # PyTorch before 2.14 refuses its own hook but for NCCL; an annotation of ours, too
    compress: Any = default_hooks.bf16_compress_hook
    model.register_comm_hook(None, lambda state, bucket: compress(state, bucket))
    return model
