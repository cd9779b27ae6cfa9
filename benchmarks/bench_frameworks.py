"""How fast models of PyTorch train, beside torch's DistributedDataParallel over gloo.

    mpirun -n 2 python benchmarks/bench_frameworks.py --output .../frameworks-mpich.json
    python benchmarks/bench_frameworks.py --nodes 2 --output .../frameworks-wire.json

The latter starts one rank on each of some virtual nodes (`tests/support/`), with a
network of 1 Gbit/s between them, and sends gradients as bfloat16, too.
Ours, torch's own over "mpidist", and torch's own over gloo train copies of models with
batches that lie ready, in turns of some steps; a transformer is sharded by FSDP2; "no
communication" is each rank by itself. Told are the medians of the slowest rank, and
ratios of turns that followed each other. At the end all must have the same weights.
Each rank computes on one core. The machine should do nothing else.
"""

from __future__ import annotations

import functools
import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import harness

# isort: split
import numpy as np
import rivals
import torch
import torch.distributed
import virtual_nodes
from harness import Comparison
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import mpidist
from mpidist.torch import DistributedDataParallel
from mpidist.torch.process_group import group_of

OURS, GLOO, ALONE = "mpidist", "torch DDP (gloo)", "no communication"
OVER, NARROW = "torch DDP (mpidist)", "mpidist, bfloat16"
FSDP_OVER, FSDP_GLOO = "FSDP2 (mpidist)", "FSDP2 (gloo)"
TINY_STEPS = 2


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
        """Return the output."""
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
        """Return the output."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.body(self.norms[1](x))


def transformer() -> Any:
    """Return four layers for sequences of rows of 256 numbers."""
    last = [nn.Flatten(), nn.Linear(16 * 256, 10)]
    return nn.Sequential(*[Layer(256) for _ in range(4)], *last)


def _targets(
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


_SHARDED = {(FSDP_OVER, FSDP_GLOO): 1.3, (FSDP_OVER, ALONE): None}
CASES = {
    "mlp": Case(
        "MLP of 10 M parameters",
        lambda: mlp(784, 2048, 2048, 2048, 10),
        *((784,), 32, 10, _targets(None, 1.5, narrow=1.75)),
    ),
    "deep": Case(
        "ten layers of 1000",
        lambda: mlp(*[1000] * 10, 10),
        *((1000,), 32, 10, _targets(None, 1.5)),
    ),
    "small": Case(
        "MLP 64-128-10",
        lambda: mlp(64, 128, 10),
        *((64,), 64, 200, _targets(None, 0.4), True),
    ),
    "resnet": Case(
        "ResNet, 8 images of 32x32", resnet, (3, 32, 32), 8, 10, _targets(1.15, None)
    ),
    "fsdp": Case("transformer of 4 layers", transformer, (16, 256), 8, 10, _SHARDED),
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


def contestants(
    case: Case, comm: MPI.Intracomm, strategy: mpidist.Strategy, is_wire: bool
) -> dict[str, Trainer]:
    """Return who trains the same model. Collective.

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


def compare(
    case: Case,
    comm: MPI.Intracomm,
    strategy: mpidist.Strategy,
    turns: int,
    is_wire: bool,
) -> tuple[list[Comparison], float]:
    """Return ours beside each of the others, and how far weights differ. Collective."""
    trainers = contestants(case, comm, strategy, is_wire)
    steps = case.steps if turns > 1 else TINY_STEPS
    calls = {name: functools.partial(t.train, steps) for name, t in trainers.items()}
    times = harness.take_turns(comm, calls, turns, warm_up=2)
    values = {
        name: [
            s / steps * 1e6 if case.is_time else case.rows * comm.size * steps / s
            for s in seconds
        ]
        for name, seconds in times.items()
    }
    found = [
        Comparison(
            case.name if own == OURS else f"{case.name}, {own}",
            other,
            "us" if case.is_time else "samples/s",
            values[own],
            values[other],
            target=target if comm.size > 1 and is_wire == (own == NARROW) else None,
            is_at_least=not case.is_time,
        )
        for (own, other), target in case.targets.items()
        if own in values
    ]
    exact = [t.weights() for n, t in trainers.items() if n not in (ALONE, NARROW)]
    pairs = [pair for other in exact[1:] for pair in zip(exact[0], other)]
    most = max(float((a - b).abs().max()) for a, b in pairs)
    return found, comm.allreduce(most, MPI.MAX)


def compare_all(
    names: Sequence[str], turns: int, folder: str | None, differences: dict[str, float]
) -> Iterator[Comparison]:
    """Yield what is compared; add by how much weights differ at the end. Collective.

    Args:
      names: which of `CASES`.
      turns: of each contestant.
      folder: that all nodes see, if there are several; None on one.
      differences: by case, of those with exact gradients.
    """
    comm, strategy = MPI.COMM_WORLD, mpidist.MirroredStrategy(["CPU:0"])
    with rivals.torch_group(comm, folder):
        for name in names:
            case = CASES[name]
            found, differences[case.name] = compare(
                case, comm, strategy, turns, is_wire=folder is not None
            )
            # While gloo is there: its threads may wait for Python's lock
            gc.collect()
            yield from found


def run_on_nodes(options: Any) -> None:
    """Run this program on virtual nodes, with a rank on each."""
    missing = virtual_nodes.what_is_missing()
    if missing:
        raise SystemExit(missing)
    words = ["--repetitions", str(options.repetitions), "--cases", *options.cases]
    if options.output is not None:
        words += ["--output", str(options.output.absolute())]
    words += ["--tiny"] * options.tiny
    with (
        tempfile.TemporaryDirectory() as folder,
        virtual_nodes.VirtualNodes(options.nodes, options.rate) as nodes,
    ):
        ended = nodes.mpirun(1, __file__, "--folder", folder, *words)
    print(ended.stdout)
    if ended.returncode:
        raise SystemExit(ended.returncode)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = harness.parser(__doc__, 15)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--nodes", type=int, help="start this on so many virtual nodes")
    add("--rate", default="1gbit", help="of each node's cable, as tc writes it (1gbit)")
    add("--folder", help="that all nodes see; for the ranks that --nodes starts")
    options = parser.parse_args(arguments)
    if options.nodes:
        run_on_nodes(options)
        return
    comm, differences = MPI.COMM_WORLD, {}
    turns = 1 if options.tiny else options.repetitions
    found = compare_all(options.cases, turns, options.folder, differences)
    harness.report(found, options.output, comm, differences=differences)
    for name, difference in differences.items():
        line = f"{name}: weights differ from DDP's by {difference:g} at most"
        harness.say(comm, line)


if __name__ == "__main__":
    main()
