"""Gradients of the mean loss over the rows of all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.jax.collectives import (
    all_reduce,
    as_leaves,
    has_collective,
    is_traced,
    result_dtype,
)
from mpidist.jax.runtime import checked, find_strategy
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import logs, validation

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: str = "mean",
    strategy: Strategy | None = None,
    options: CommunicationOptions | None = None,
) -> Callable[..., Any]:
    """Like `jax.value_and_grad`, with value and gradients over all replicas.

    The returned function is collective: inside `jit` it makes one all_reduce; outside,
    with compression, or if `fun` makes collectives, one more to learn the number of all
    rows. `fun` returns the mean over this replica's rows. The results are means over
    the rows of all replicas, weighted by their numbers of rows. Replicas without rows
    contribute nothing, even if `fun` returns nan there. For a `fun` that returns a sum,
    such as one divided by the size of the global batch, pass `reduction="sum"`: else
    the gradient is too small by the number of replicas.

    Args:
      fun: as in `jax.value_and_grad`; it may use collectives of mpidist.jax.
      argnums: the positional arguments to differentiate by.
      has_aux: whether `fun` returns a value and auxiliary data, which is returned for
        this replica only.
      batch_argnums: which positional arguments have rows, along their first dimension;
        by default all that are not in `argnums`. With () no argument has rows, and all
        replicas have the same weight.
      reduction: "mean", or "sum" if `fun` returns a sum over this replica's rows, as in
        TensorFlow: then the results are the sums over all replicas.
      strategy: by default the current one when the function is called (inside `jit`:
        traced).
      options: see `CommunicationOptions`.

    Returns:
      A function like `fun` that returns `(value, gradients)`, or
      `((value, aux), gradients)`.

    Raises:
      ArgumentError: another `reduction`; when called: the arguments with rows have no
        dimensions, or different numbers of rows. See also `jax.value_and_grad` and
        `all_reduce`.

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
    _require_reduction(reduction)

    @functools.wraps(fun)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        current = find_strategy(strategy, call)
        if current.num_replicas_in_sync == 1:
            return jax.value_and_grad(fun, argnums, has_aux)(*args, **kwargs)

        # `fun` may communicate, so its errors are left to `strategy.run`
        loss = _Loss(fun, argnums, has_aux, None, options, current)
        if reduction == "sum":
            both, aux = loss.of_replicas("SUM", args, kwargs)
        else:
            _say_how(call)
            both, aux = _of_rows(loss, call, args, kwargs, numbers, batch)
        return ((both[0], aux), both[1]) if has_aux else both

    return differentiate


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    batch_argnums: int | Sequence[int] | None = None,
    reduction: str = "mean",
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
        reduction=reduction,
        strategy=strategy,
        options=options,
    )

    @functools.wraps(fun)
    def differentiate(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return differentiate


@functools.cache
def _say_how(call: str) -> None:
    """Say once how losses are combined, and how sums are."""
    said = f"{call} takes the mean of the loss over the rows of all replicas"
    other = "for a loss divided by the rows of all replicas pass reduction='sum'"
    logs.info("jax", f"{said}; {other}")


def mean_over_rows(
    values: Any,
    rows: Any,
    *,
    options: CommunicationOptions | None = None,
    strategy: Strategy | None = None,
) -> Any:
    """Return the mean of a pytree over the rows of all replicas. Collective.

    For gradients that another library has computed (such as `nnx.grad`), and for
    running statistics. It makes one all_reduce, inside or outside `jit`; with
    compression, one more for the number of all rows, which is exact.

    Args:
      values: a pytree of means over this replica's rows.
      rows: the number of this replica's rows. With 0 its values do not count, even if
        they are nan.
      options: see `CommunicationOptions`.
      strategy: by default the current one.

    Returns:
      A pytree of the same dtypes; the mean of integers is JAX's default float.

    Raises: see `all_reduce`.

    Example:
      >>> rank = strategy.rank
      >>> mean = jnp.float32(rank)  # 0 over 3 rows, and 1 over 2
      >>> print(mpidist.jax.mean_over_rows(mean, 3 - rank, strategy=strategy))
      0.4
    """
    call = "mpidist.jax.mean_over_rows"
    strategy = find_strategy(strategy, call)
    sums, count, dtypes = checked(strategy, call, lambda: _sums(values, rows, call))
    if getattr(options, "compression", None) is None:
        sums, total = all_reduce("SUM", (sums, count), options, strategy=strategy)
        means = jax.tree.map(lambda x: x / total.astype(x.dtype), sums)
    else:  # neither the number of rows nor sums over rows fit narrow numbers
        total = all_reduce("SUM", count, _plain(options), strategy=strategy)
        shares = jax.tree.map(lambda x: x / total.astype(x.dtype), sums)
        means = all_reduce("SUM", shares, options, strategy=strategy)
    return jax.tree.map(lambda x, dtype: x.astype(dtype), means, dtypes)


def _plain(options: CommunicationOptions | None) -> CommunicationOptions | None:
    seconds = None if options is None else options.timeout_seconds
    return None if seconds is None else CommunicationOptions(timeout_seconds=seconds)


def _sums(means: Any, rows: Any, call: str) -> tuple[Any, Any, Any]:
    """Return sums over rows, the number of rows, and the dtypes of means."""

    def sum_of(mean: Any, dtype: Any) -> Any:
        wide = jnp.promote_types(dtype, jnp.float32)  # 16 bits would overflow
        return jnp.where(count > 0, mean.astype(wide) * count.astype(wide), 0)

    means = jax.tree.map(lambda mean: as_leaves([mean], call)[0], means)
    # bool has a mean here, as integers have
    numbers = jax.tree.map(lambda mean: jnp.promote_types(mean.dtype, "i1"), means)
    dtypes = jax.tree.map(lambda dtype: result_dtype(ReduceOp.MEAN, dtype), numbers)
    # float64 for means of that: float32 counts up to 2**24
    count = jnp.asarray(rows, jnp.result_type(float))
    return jax.tree.map(sum_of, means, dtypes), count, dtypes


def _communicates(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    numbers: Sequence[int],
    strategy: Strategy,
) -> bool:
    """Return whether `fun` makes collectives; True outside `jit`, where it may."""
    if not is_traced(jax.tree.leaves(args)):
        return True

    def of_differentiated(*differentiated: Any) -> Any:
        every = list(args)
        for i, arg in zip(numbers, differentiated):
            every[i] = arg
        return jax.tree.leaves(fun(*every, **kwargs))

    traced = jax.make_jaxpr(of_differentiated)(*(args[i] for i in numbers))
    return has_collective(traced, strategy)


class _Loss(NamedTuple):
    """A loss, and how its replicas count."""

    fun: Callable[..., Any]
    argnums: int | Sequence[int]
    has_aux: bool
    rows: int | None
    options: CommunicationOptions | None
    strategy: Strategy

    def differentiate(self, args: Any, kwargs: Any, weight: Any = None) -> Any:
        fun = self.fun if weight is None else _weighted(self.fun, self.has_aux, weight)
        differentiated = jax.value_and_grad(fun, self.argnums, self.has_aux)
        value, gradients = differentiated(*args, **kwargs)
        value, aux = value if self.has_aux else (value, None)
        return (value, gradients), aux

    def of_replicas(self, op: str, args: Any, kwargs: Any) -> Any:
        """Return the reduction of the replicas' values and gradients. Collective."""
        both, aux = self.differentiate(args, kwargs)
        more: Any = {"options": self.options, "strategy": self.strategy}
        return all_reduce(op, both, **more), aux

    def of_means(self, args: Any, kwargs: Any) -> Any:
        """Return the mean over the rows of all replicas. Collective."""
        if self.rows is None:
            return self.of_replicas("MEAN", args, kwargs)
        both, aux = self.differentiate(args, kwargs)
        more: Any = {"options": self.options, "strategy": self.strategy}
        return mean_over_rows(both, self.rows, **more), aux

    def of_weighted(self, args: Any, kwargs: Any) -> Any:
        """Return the same for a loss that makes collectives. Collective.

        A replica's gradients then include derivatives of other replicas' values, which
        need their weights from the beginning.
        """
        more: Any = {"options": self.options, "strategy": self.strategy}
        count = jnp.asarray(self.rows, jnp.result_type(float))
        total = all_reduce("SUM", count, _plain(self.options), strategy=self.strategy)
        both, aux = self.differentiate(args, kwargs, count / total)
        if self.rows == 0:  # its own values may be nan, and do not count
            both = jax.tree.map(
                lambda x: jnp.where(jnp.isnan(x) & (total > 0), 0, x), both
            )
        return all_reduce("SUM", both, **more), aux


def _of_rows(
    loss: _Loss,
    call: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    numbers: Sequence[int],
    batch: Sequence[int] | None,
) -> Any:
    """Return the mean over the rows of all replicas. Collective."""
    strategy = loss.strategy
    rows = checked(strategy, call, lambda: _count_rows(call, args, numbers, batch))
    loss = loss._replace(rows=rows)
    if rows is not None and _communicates(loss.fun, args, kwargs, numbers, strategy):
        return loss.of_weighted(args, kwargs)
    return loss.of_means(args, kwargs)


def _require_reduction(reduction: Any) -> None:
    if reduction not in ("mean", "sum"):
        shown = validation.shown(reduction)
        raise ArgumentError(f"reduction must be 'mean' or 'sum', not {shown}")


def _weighted(fun: Callable[..., Any], has_aux: bool, weight: Any) -> Any:

    @functools.wraps(fun)
    def weighted(*args: Any, **kwargs: Any) -> Any:
        result = fun(*args, **kwargs)
        value, aux = result if has_aux else (result, None)
        value = (value * weight).astype(jnp.result_type(value))
        return (value, aux) if has_aux else value

    return weighted


def _numbers(name: str, value: int | Sequence[int]) -> tuple[int, ...]:
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
    call: str, args: Sequence[Any], numbers: Sequence[int], batch: Sequence[int] | None
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
        differentiated = {i % len(args) for i in numbers if -len(args) <= i < len(args)}
        batch = [i for i in range(len(args)) if i not in differentiated]
    if any(not -len(args) <= i < len(args) for i in batch):
        raise ArgumentError(
            f"{call}: batch_argnums={tuple(batch)} names an argument that does not "
            f"exist; there are {len(args)}"
        )
    shapes = [jnp.shape(leaf) for i in batch for leaf in jax.tree.leaves(args[i])]
    lengths = {shape[0] if shape else None for shape in shapes}
    if len(lengths) != 1 or None in lengths:
        shown = ", ".join(map(str, shapes[:8])) or "none"
        raise ArgumentError(
            f"{call}: the number of rows is ambiguous: the arrays in arguments "
            f"{list(batch)} have the shapes {shown}; {advice}"
        )
    return int(lengths.pop() or 0)
