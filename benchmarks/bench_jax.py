"""What a training step with mpidist.jax costs, beside JAX alone on one device.

    mpirun -n 1 python benchmarks/bench_jax.py --output .../jax-mpich-1rank.json
    mpirun -n 2 python benchmarks/bench_jax.py --output .../jax-mpich-2ranks.json

The step is compiled, reduces its gradients inside, and changes the weights of a
perceptron. JAX alone takes the same rows as a rank does, and reduces nothing. Both take
turns; told are microseconds per step of the slowest rank, medians, and ratios of turns
that followed each other. With 1 rank the weights must be equal at the end. The machine
should do nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# One rank is one share of the CPU
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import charts
import jax
import jax.numpy as jnp
import measuring
import numpy as np
from comparisons import TABLE_HEAD, Comparison
from mpi4py import MPI

import mpidist
import mpidist.jax

# The units of each layer, and the rows of a rank
CASES = {
    "small MLP, 64-128-10, 64 rows": ((64, 128, 10), 64),
    "MLP of 10 M parameters, 64 rows": ((1024, 2048, 2048, 1792, 10), 64),
}
TARGET = 1.1  # with 1 rank


def first_weights(units: Sequence[int]) -> Any:
    random = np.random.default_rng(0)
    shapes = itertools.pairwise(units)
    return [
        (jnp.asarray(random.normal(scale=a**-0.5, size=(a, b)), "f"), jnp.zeros(b, "f"))
        for a, b in shapes
    ]


def loss_of(weights: Any, x: Any, y: Any) -> Any:
    for w, b in weights[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = weights[-1]
    return -jnp.mean(
        jnp.take_along_axis(jax.nn.log_softmax(x @ w + b), y[:, None], axis=1)
    )


def step_by(value_and_grad: Callable[..., Any], jit: Callable[..., Any]) -> Any:
    """Return a compiled step of a training."""

    def step(weights: Any, x: Any, y: Any) -> Any:
        loss, gradient = value_and_grad(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradient), loss

    return jit(step)


def measure(
    comm: MPI.Intracomm, strategy: mpidist.Strategy, case: str, turns: int, steps: int
) -> Comparison:
    """Return how long both take. Collective."""
    units, rows = CASES[case]
    random = np.random.default_rng(comm.rank)
    x = jnp.asarray(random.normal(size=(rows, units[0])), "f")
    y = jnp.asarray(random.integers(units[-1], size=rows), "int32")
    ours = mpidist.jax.value_and_grad(loss_of, strategy=strategy)
    contestants = {
        "mpidist": step_by(ours, mpidist.jax.jit),
        "JAX": step_by(jax.value_and_grad(loss_of), jax.jit),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    weights = dict.fromkeys(contestants, first_weights(units))
    for turn in range(2 + turns):
        for name, step in contestants.items():
            comm.Barrier()
            start = time.perf_counter()
            for _ in range(steps):
                weights[name], loss = step(weights[name], x, y)
            jax.block_until_ready((weights[name], loss))
            seconds = comm.allreduce(time.perf_counter() - start, MPI.MAX)
            if turn >= 2:
                times[name].append(seconds / steps * 1e6)
    if comm.size == 1:
        pairs = zip(*map(jax.tree.leaves, weights.values()), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    target = TARGET if comm.size == 1 else None
    against = "JAX alone, reducing nothing"
    return Comparison(
        case, against, "us", times["mpidist"], times["JAX"], target, False
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, help="JSON file; and PNG")
    add("--turns", type=int, default=15, help="of each (default 15)")
    add("--tiny", action="store_true", help="only see that all run")
    options = parser.parse_args(arguments)
    comm = MPI.COMM_WORLD
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    comparisons = []
    for case in list(CASES)[: 1 if options.tiny else None]:
        steps = 2 if options.tiny else 5 if "10 M" in case else 200
        turns = 1 if options.tiny else options.turns
        comparisons.append(measure(comm, strategy, case, turns, steps))
    if comm.rank:
        return
    print(TABLE_HEAD)
    for comparison in comparisons:
        print(comparison.line())
    if options.output:
        result = {
            "machine": measuring.describe_machine(Path(tempfile.gettempdir())),
            "jax": jax.__version__,
            "date": datetime.date.today().isoformat(),
            "ranks": comm.size,
            "comparisons": [comparison.as_dict() for comparison in comparisons],
        }
        measuring.save(options.output, result)
        chart = options.output.with_suffix(".png")
        charts.draw(charts.draw_frameworks, result, chart)


if __name__ == "__main__":
    main()
