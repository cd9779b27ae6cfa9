"""Collectives on JAX arrays, inside and outside `jit`, `grad`, `vmap` and `scan`.

Inside, each is a JAX primitive with rules for derivatives and vmap. It is lowered to an
ordered `io_callback`, which keeps collectives in program order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Jaxpr, Primitive
from jax.interpreters import ad, batching, mlir

from mpidist.comm import arithmetic
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpidist.jax.runtime import (
    announced,
    call_host,
    find_strategy,
    require_dispatch,
    trace_state_clean,
)
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import validation

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy


class _Call(NamedTuple):
    """A collective inside a computation.

    Args:
      name: "all_reduce", "all_gather" or "broadcast".
      strategy: the strategy of the replicas.
      op: the operation of an all_reduce.
      options: of an all_reduce or all_gather.
      root: the root of a broadcast.
    """

    name: str
    strategy: Strategy
    op: ReduceOp | None = None
    options: CommunicationOptions | None = None
    root: int = 0

    @property
    def operation(self) -> str:
        return f"mpidist.jax.{self.name}"


@announced
def all_reduce(
    reduce_op: ReduceOp | str,
    value: Any,
    options: CommunicationOptions | None = None,
    *,
    strategy: Strategy | None = None,
) -> Any:
    """Return the reduction of a pytree of arrays over all replicas. Collective.

    Derivatives are taken of the sum of all replicas' results: the derivative of a SUM
    is the SUM of the derivatives, and the derivative of a MEAN is their MEAN. Under
    vmap, arrays are reduced with their batch dimension.

    Args:
      reduce_op: SUM, MEAN, MIN, MAX or PRODUCT, or its name in any case.
      value: of equal structure, shapes and dtypes on all replicas.
      options: see `CommunicationOptions`.
      strategy: by default the current one.

    Returns:
      A pytree of JAX arrays; SUM keeps dtypes, MEAN of integers is JAX's default float.

    Raises, on all replicas: what `ReplicaContext.all_reduce` raises (inside
      `jax.jit`, see `mpidist.jax.jit`); UnsupportedError: the derivative of MIN, MAX or
      PRODUCT; see also `require_dispatch`.

    Example:
      >>> total = mpidist.jax.all_reduce("SUM", jnp.ones(2), strategy=strategy)
      >>> total
      Array([2., 2.], dtype=float32)
    """
    call = "mpidist.jax.all_reduce"
    strategy = find_strategy(strategy, call)
    leaves, tree = jax.tree.flatten(value)
    if not is_traced(leaves):
        reduced = strategy.extended.collectives.all_reduce(
            call, reduce_op, leaves, options
        )
        return jax.tree.unflatten(tree, map(jnp.asarray, reduced))
    op = ReduceOp.parse(reduce_op)
    _require_options(options)
    leaves = as_leaves(leaves, call)
    for leaf in leaves:
        arithmetic.require_reducible(op, np.dtype(leaf.dtype), call)
    return jax.tree.unflatten(
        tree, _bind(leaves, _Call("all_reduce", strategy, op, options))
    )


@announced
def all_gather(
    value: Any,
    axis: int = 0,
    options: CommunicationOptions | None = None,
    *,
    strategy: Strategy | None = None,
) -> Any:
    """Return the replicas' arrays concatenated along `axis`. Collective.

    Inside `jit` and other transformations, shapes must agree on all replicas; outside,
    lengths along `axis` may differ. Derivatives are taken of the sum of all replicas'
    results.

    Args:
      value: a pytree of arrays with ndim >= 1.
      axis: -ndim <= axis < ndim.
      options: see `CommunicationOptions`.
      strategy: by default the current one.

    Raises, on all replicas: see `all_reduce`, and `ReplicaContext.all_gather`.

    Example:
      >>> rank = strategy.rank
      >>> mpidist.jax.all_gather(jnp.array([rank]), strategy=strategy)
      Array([0, 1], dtype=int32)
    """
    call = "mpidist.jax.all_gather"
    strategy = find_strategy(strategy, call)
    leaves, tree = jax.tree.flatten(value)
    if not is_traced(leaves):
        gathered = strategy.extended.collectives.all_gather(call, leaves, axis, options)
        return jax.tree.unflatten(tree, map(jnp.asarray, gathered))
    _require_options(options)
    axis = validation.integer("axis", axis)
    leaves = as_leaves(leaves, call)
    for leaf in leaves:
        if not -leaf.ndim <= axis < leaf.ndim:
            raise ArgumentError(
                f"{call}: axis {axis} is out of range for shape {leaf.shape}"
            )
    stacks = _bind(leaves, _Call("all_gather", strategy, options=options))
    return jax.tree.unflatten(
        tree,
        [
            jnp.concatenate(list(stack), axis) if len(stack) > 1 else stack[0]
            for stack in stacks
        ],
    )


@announced
def broadcast(value: Any, root: int = 0, *, strategy: Strategy | None = None) -> Any:
    """Return the arrays of replica `root`, on every replica. Collective.

    Every replica passes a pytree of the same structure, shapes and dtypes. Derivatives
    are taken of the sum of all replicas' results.

    Args:
      value: a pytree of arrays.
      root: a replica, the same number on all.
      strategy: by default the current one.

    Raises, on all replicas: see `all_reduce`; ArgumentError: no such replica.

    Example:
      >>> rank = strategy.rank
      >>> mpidist.jax.broadcast(jnp.array([rank]), root=1, strategy=strategy)
      Array([1], dtype=int32)
    """
    call = "mpidist.jax.broadcast"
    strategy = find_strategy(strategy, call)
    leaves, tree = jax.tree.flatten(value)
    size = strategy.num_replicas_in_sync

    def check() -> int:
        number = validation.integer("root", root, 0)
        if number >= size:
            raise ArgumentError(f"{call}: root must be below {size}, not {number}")
        return number

    if is_traced(leaves):
        bound = _bind(
            as_leaves(leaves, call), _Call("broadcast", strategy, root=check())
        )
        return jax.tree.unflatten(tree, bound)
    with strategy.extended.consensus.call(call) as opened:
        got = _broadcast_arrays(strategy, opened.reserve(check), leaves)
    return jax.tree.unflatten(tree, map(jnp.asarray, got))


def is_traced(leaves: Sequence[Any]) -> bool:
    """Return whether JAX is tracing a computation."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return True
    # A constant inside jit is not a tracer, but a call with it would run only once
    return not trace_state_clean()


def has_collective(traced: Any, strategy: Strategy) -> bool:
    """Return whether a jaxpr has collectives of a strategy, at any depth."""
    jaxpr = getattr(traced, "jaxpr", traced)  # of a closed one
    if not isinstance(jaxpr, Jaxpr):
        return isinstance(traced, tuple | list) and any(
            has_collective(item, strategy) for item in traced
        )
    for equation in jaxpr.eqns:
        if equation.primitive is _collective_p:
            if equation.params["call"].strategy is strategy:
                return True
        elif has_collective(tuple(equation.params.values()), strategy):
            return True
    return False


def result_dtype(op: ReduceOp, dtype: Any) -> Any:
    """Return the dtype of a reduction's results, as JAX has it without x64."""
    return jax.dtypes.canonicalize_dtype(op.rule.result(np.dtype(dtype)))


def as_leaves(leaves: Sequence[Any], call: str) -> list[Any]:
    """Return leaves as JAX arrays, or raise an ArgumentTypeError or DTypeError."""
    for leaf in leaves:
        arrays.require_plain(leaf, f"an argument of {call}")
    try:
        converted = [jnp.asarray(leaf) for leaf in leaves]
    except TypeError as error:
        raise ArgumentTypeError(str(error)) from error
    for leaf in converted:
        arrays.refuse_keys(leaf, f"an argument of {call}")
    return converted


def _require_options(options: Any) -> None:
    if options is not None:
        validation.instance("options", options, CommunicationOptions)


def _bind(leaves: Sequence[Any], call: _Call) -> list[Any]:
    if not leaves:
        return []
    if call.strategy.num_replicas_in_sync == 1:
        avals = _shapes(leaves, call)
        return [
            jnp.reshape(x, aval.shape).astype(aval.dtype)
            for x, aval in zip(leaves, avals)
        ]
    require_dispatch(call.strategy, call.operation)
    return list(_collective_p.bind(*leaves, call=call))


def _shapes(args: Sequence[Any], call: _Call) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of results. An all_gather stacks its arguments."""
    front = (call.strategy.num_replicas_in_sync,) if call.name == "all_gather" else ()
    dtypes = [result_dtype(call.op, a.dtype) if call.op else a.dtype for a in args]
    shapes = [(*front, *a.shape) for a in args]
    return list(map(jax.ShapeDtypeStruct, shapes, dtypes))


def _communicate(call: _Call, shapes: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Return the results as NumPy arrays. Collective."""
    strategy, operation = call.strategy, call.operation
    collectives = strategy.extended.collectives

    def work() -> list[Any]:
        # Views of XLA's memory, which is valid until this callback returns
        host_arrays = [np.asarray(arg) for arg in args]
        if call.name == "all_reduce":
            assert call.op is not None
            results = collectives.all_reduce(
                operation, call.op, host_arrays, call.options
            )
        elif call.name == "all_gather":
            rows = [array[None] for array in host_arrays]
            results = collectives.all_gather(operation, rows, 0, call.options)
        else:
            results = _broadcast_arrays(strategy, call.root, host_arrays)
        return [np.asarray(a, s.dtype) for a, s in zip(results, shapes)]

    return list(call_host(strategy, operation, work))


def _broadcast_arrays(strategy: Strategy, root: int, leaves: Sequence[Any]) -> Any:
    """Return the arrays of the replica `root`. Collective."""
    operation = f"mpidist.jax.broadcast from replica {root}"
    return strategy.extended.collectives.broadcast(operation, list(leaves), root)


def _lowered(*args: Any, call: _Call) -> Any:
    """Return the ordered callback that replaces the primitive in compiled code."""
    shapes = _shapes(args, call)

    def host(*arrays: Any) -> list[Any]:
        return _communicate(call, shapes, arrays)

    return io_callback(host, shapes, *args, ordered=True)


def _evaluate(*args: Any, call: _Call) -> list[Any]:
    """Evaluate outside jit, perhaps under grad or vmap, with concrete arguments."""
    got = _communicate(call, _shapes(args, call), args)
    return [jnp.array(array, copy=True) for array in got]


def _derive(primals: Any, tangents: Any, *, call: _Call) -> tuple[Any, Any]:
    """Return results and their tangents: a collective is linear."""
    results = _collective_p.bind(*primals, call=call)
    if call.op is not None and not call.op.adds:
        raise UnsupportedError(
            f"{call.operation} of {call.op.name} has no derivative; use SUM or MEAN, "
            "or jax.lax.stop_gradient"
        )
    varying = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    derivatives = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if varying:
        inputs = [tangents[i] for i in varying]
        for i, tangent in zip(varying, _collective_p.bind(*inputs, call=call)):
            derivatives[i] = tangent
    return results, derivatives


def _transpose(cotangents: Any, *primals: Any, call: _Call) -> list[Any]:
    """Return the cotangents of the arguments, summed over all replicas."""
    varying = [i for i, c in enumerate(cotangents) if type(c) is not ad.Zero]
    results: list[Any] = [ad.Zero(p.aval) for p in primals]
    if not varying:
        return results
    # The derivative of the sum of all replicas' results: each replica's arguments were
    # used on all of them, so what comes back is added over the replicas
    reverse = call
    if call.name != "all_reduce":
        reverse = _Call("all_reduce", call.strategy, ReduceOp.SUM, call.options)
    replica = call.strategy.extended.replica_id
    inputs = [cotangents[i] for i in varying]
    for i, total in zip(varying, _collective_p.bind(*inputs, call=reverse)):
        # Of a gathered stack, this replica's argument is one row; of a broadcast, only
        # the root's argument was used
        if call.name == "all_gather":
            total = total[replica]
        elif call.name == "broadcast" and call.root != replica:
            total = jnp.zeros_like(total)
        results[i] = total
    return results


def _batch(args: Any, dims: Any, *, call: _Call) -> tuple[list[Any], list[Any]]:
    """Return the results of batched arrays, and their batch dimensions."""
    shift = 1 if call.name == "all_gather" else 0
    results = _collective_p.bind(*args, call=call)
    # None: this array has no batch dimension
    return results, [None if d is None else d + shift for d in dims]


def _ordered_effects() -> Any:
    like = jax.ShapeDtypeStruct((), np.float32)
    traced = jax.make_jaxpr(lambda x: io_callback(lambda a: a, like, x, ordered=True))
    return traced(like).effects


_collective_p = Primitive("mpidist_collective")
_collective_p.multiple_results = True
_collective_p.def_impl(_evaluate)
_EFFECTS = _ordered_effects()
_collective_p.def_effectful_abstract_eval(
    lambda *args, call: (
        [jax.core.ShapedArray(s.shape, s.dtype) for s in _shapes(args, call)],
        _EFFECTS,
    )
)
mlir.register_lowering(_collective_p, mlir.lower_fun(_lowered, multiple_results=True))
ad.primitive_jvps[_collective_p] = _derive
ad.primitive_transposes[_collective_p] = _transpose
batching.primitive_batchers[_collective_p] = _batch
