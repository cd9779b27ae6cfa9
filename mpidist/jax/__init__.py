"""Data parallelism for programs in JAX: gradients of all replicas, collectives in jit.

    import jax
    import mpidist.jax

    strategy = mpidist.MirroredStrategy()

    @mpidist.jax.jit
    def step(weights, x, y):  # x and y are this replica's rows
        both = mpidist.jax.value_and_grad(loss_of, strategy=strategy)
        loss, gradient = both(weights, x, y)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradient), loss

`value_and_grad` and `grad` are like JAX's, but return the mean over the rows of all
replicas; `mean_over_rows` takes the gradients of other libraries. `all_reduce`,
`all_gather` and `broadcast` work inside `jit`, `grad`, `vmap`, `scan` and `cond`, and
outside. `jit` is `jax.jit`, but raises the errors of mpidist. `as_jax` gives batches as
JAX arrays.

Outside `jit`, all of mpidist accepts JAX arrays too:
`strategy.reduce("MEAN", gradients)`, `Checkpoint(params=params)`. A `Variable` holds
NumPy arrays: you can assign JAX arrays to it, and `jnp.asarray(variable)` copies it.

Import this module before JAX computes anything: it makes JAX dispatch CPU computations
synchronously, which collectives inside `jit` need. They also need exactly one CPU
device per process.
"""

from __future__ import annotations

from mpidist.jax.collectives import all_gather, all_reduce, broadcast
from mpidist.jax.gradients import grad, mean_over_rows, value_and_grad
from mpidist.jax.runtime import JaxDataset, JaxIterator, as_jax, jit

__all__ = [
    "JaxDataset",
    "JaxIterator",
    "all_gather",
    "all_reduce",
    "as_jax",
    "broadcast",
    "grad",
    "jit",
    "mean_over_rows",
    "value_and_grad",
]
