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

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import harness

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from harness import Comparison
from mpi4py import MPI

import mpidist
import mpidist.jax

OURS, ALONE = "mpidist", "JAX alone, reducing nothing"
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
) -> list[Comparison]:
    """Return how long both take. Collective."""
    units, rows = CASES[case]
    random = np.random.default_rng(comm.rank)
    x = jnp.asarray(random.normal(size=(rows, units[0])), "f")
    y = jnp.asarray(random.integers(units[-1], size=rows), "int32")
    ours = mpidist.jax.value_and_grad(loss_of, strategy=strategy)
    compiled = {
        OURS: step_by(ours, mpidist.jax.jit),
        ALONE: step_by(jax.value_and_grad(loss_of), jax.jit),
    }
    weights = dict.fromkeys(compiled, first_weights(units))

    def train(name: str) -> None:
        for _ in range(steps):
            weights[name], loss = compiled[name](weights[name], x, y)
        jax.block_until_ready((weights[name], loss))

    calls = {name: functools.partial(train, name) for name in compiled}
    times = harness.take_turns(comm, calls, turns, warm_up=2)
    if comm.size == 1:
        pairs = zip(*map(jax.tree.leaves, weights.values()), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
    steps_of = {name: [s / steps for s in seconds] for name, seconds in times.items()}
    target = TARGET if comm.size == 1 else None
    return harness.beside(case, steps_of, {ALONE: target}, ours=OURS)


def main(arguments: Sequence[str] | None = None) -> None:
    options = harness.parser(__doc__, 15).parse_args(arguments)
    strategy = mpidist.MirroredStrategy(["CPU:0"])
    turns = 1 if options.tiny else options.repetitions

    def compare() -> Iterator[Comparison]:
        for case in list(CASES)[: 1 if options.tiny else None]:
            steps = 2 if options.tiny else 5 if "10 M" in case else 200
            yield from measure(MPI.COMM_WORLD, strategy, case, turns, steps)

    harness.report(compare(), options.output, MPI.COMM_WORLD)


if __name__ == "__main__":
    main()
