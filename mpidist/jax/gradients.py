"""Gradients of the mean loss over the rows of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.jax.collectives import all_reduce
from mpidist.jax.runtime import find_strategy
from mpidist.options import CommunicationOptions
from mpidist.util import validation

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

__all__ = ["grad", "value_and_grad"]


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    strategy: Strategy | None = None,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, with value and gradients over all replicas.

    The returned function is collective: it makes one all_reduce, inside or outside
    `jit`. `fun` returns the mean over this replica's rows. The results are means over
    the rows of all replicas, weighted by their numbers of rows. Replicas without rows
    contribute nothing, even if `fun` returns nan there.

    Args:
      fun: as in `jax.value_and_grad`; it may use collectives of mpidist.jax.
      argnums: the positional arguments to differentiate by.
      has_aux: whether `fun` returns a value and auxiliary data, which is returned for
        this replica only.
      batch_argnums: which positional arguments have rows, along their first dimension;
        by default all that are not in `argnums`. With () no argument has rows, and all
        replicas have the same weight.
      strategy: by default the current one when the function is called (inside `jit`:
        traced).
      options: see `CommunicationOptions`.

    Returns:
      A function like `fun` that returns `(value, gradients)`, or
      `((value, aux), gradients)`.

    Raises, when called: ArgumentError: the arguments with rows have no dimensions, or
    different numbers of rows. See also `jax.value_and_grad` and `all_reduce`.

    Example:
      >>> mean_of = lambda w, x: jnp.mean(w * x)
      >>> both = mpidist.jax.value_and_grad(mean_of, strategy=strategy)
      >>> print(*both(2.0, jnp.ones(4)))  # of the rows of all replicas
      2.0 1.0
    """
    call = "mpidist.jax.value_and_grad"
    validation.function("fun", fun)
    numbers = _numbers("argnums", argnums)
    batch = None if batch_argnums is None else _numbers("batch_argnums", batch_argnums)

    @functools.wraps(fun)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        found = find_strategy(strategy, call)
        if found.num_replicas_in_sync == 1:
            return jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)

        # `fun` may communicate, so its errors are left to `strategy.run`
        rows, is_wide = found.extended.consensus.guard(
            call,
            lambda: (
                _count_rows(call, args, numbers, batch),
                not _has_float16([args[i] for i in numbers]),
            ),
        )
        scaled = _scale(fun, has_aux, rows if is_wide else None)
        differentiated = jax.value_and_grad(scaled, argnums, has_aux)
        value, gradients = differentiated(*args, **kwargs)
        value, aux = value if has_aux else (value, None)
        value, gradients = _mean_over_rows(
            (value, gradients), rows, is_wide, options, found
        )
        return ((value, aux) if has_aux else value), gradients

    return differentiate


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    strategy: Strategy | None = None,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Like `jax.grad`, with gradients over all replicas.

    See `value_and_grad`. The returned function is collective; it returns the gradients,
    or `(gradients, aux)`.

    Example:
      >>> gradient = mpidist.jax.grad(lambda w, x: jnp.mean(w * x), strategy=strategy)
      >>> print(gradient(2.0, jnp.ones(4)))
      1.0
    """
    both = value_and_grad(
        fun,
        argnums,
        has_aux,
        batch_argnums=batch_argnums,
        strategy=strategy,
        options=options,
    )

    @functools.wraps(fun)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiate


def _scale(fun: Callable[..., Any], has_aux: bool, rows: int | None) -> Any:
    """Return `fun` with its value times `rows`.

    Scale before differentiating: if `fun` contains collectives, a replica's gradients
    include derivatives of other replicas' values, weighted by their rows.
    """
    if rows is None:
        return fun

    @functools.wraps(fun)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        return (result[0] * rows, result[1]) if has_aux else result * rows

    return scaled


def _mean_over_rows(
    sums: Any,
    rows: int | None,
    is_scaled: bool,
    options: CommunicationOptions | None,
    strategy: Strategy,
) -> Any:
    """Return the mean of a pytree over the rows of all replicas. Collective.

    Args:
      sums: sums over this replica's rows; means if not `is_scaled`.
      rows: the number of rows of this replica; None to weight all replicas equally.
      is_scaled: see `sums`.
      options: see `CommunicationOptions`.
      strategy: the strategy of the replicas.
    """
    if rows is None:
        return all_reduce("MEAN", sums, options, strategy=strategy)
    dtypes = jax.tree.map(lambda x: x.dtype, sums)
    if rows == 0:  # the means are nan
        sums = jax.tree.map(jnp.zeros_like, sums)
    if not is_scaled:
        sums = jax.tree.map(lambda x: _widen(x) * rows, sums)
    totals, count = all_reduce(
        "SUM", (sums, jnp.asarray(rows, jnp.float32)), options, strategy=strategy
    )
    return _divide(totals, count, dtypes)


def _divide(totals: Any, count: Any, dtypes: Any) -> Any:
    return jax.tree.map(lambda x, d: (_widen(x) / count).astype(d), totals, dtypes)


def _widen(x: Any) -> Any:
    """Return 16-bit floats as float32."""
    return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits == 16 else x


def _has_float16(values: Any) -> bool:
    """Return whether sums over rows may overflow in a leaf's dtype."""
    return any(
        getattr(x, "dtype", None) == jnp.float16 for x in jax.tree.leaves(values)
    )


def _numbers(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
    """Return numbers of arguments as a tuple."""
    if isinstance(value, int):
        return (value,)
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(i, int) for i in value
    ):
        raise ArgumentTypeError(
            f"{name} must be an int or a tuple of ints, not {value!r:.80}"
        )
    return tuple(value)


def _count_rows(
    call: str,
    args: Sequence[Any],
    numbers: Sequence[int],
    batch: Sequence[int] | None,
) -> int | None:
    """Return the number of rows of this replica; None if no argument has rows.

    Raises:
      ArgumentError: the arguments have different numbers of rows, or no dimensions; or
        there is no such argument.
    """
    if batch == ():
        return None
    advice = (
        "pass the numbers of the arguments whose first dimension counts rows, such as "
        "batch_argnums=(1, 2), or batch_argnums=() to weight all replicas equally"
    )
    if batch is None:
        own = {i % len(args) for i in numbers if -len(args) <= i < len(args)}
        batch = [i for i in range(len(args)) if i not in own]
    if any(not -len(args) <= i < len(args) for i in batch):
        raise ArgumentError(
            f"{call}: batch_argnums={tuple(batch)} names an argument that does not "
            f"exist; there are {len(args)}"
        )
    shapes = [jnp.shape(leaf) for i in batch for leaf in jax.tree.leaves(args[i])]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths:
        found = ", ".join(map(str, shapes[:8])) or "none"
        raise ArgumentError(
            f"{call}: the number of rows is ambiguous: the arrays in arguments "
            f"{list(batch)} have the shapes {found}; {advice}"
        )
    return int(lengths.pop() or 0)
