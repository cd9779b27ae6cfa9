"""Reductions of nests with IndexedSlices, which are never made dense.

Their rows are gathered, as in TensorFlow: an index of several replicas occurs several
times, and its rows add up when they are added to an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.comm import packing
from mpidist.comm.collectives.arguments import describe_but, option_fields
from mpidist.comm.collectives.gather import execute_gather, plan_gather
from mpidist.comm.collectives.plans import CollectiveContext
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.device import arrays
from mpidist.errors import ArgumentError, DTypeError
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import nest, validation
from mpidist.util.dtypes import accumulator_dtype, is_integer
from mpidist.util.last_resort import with_spare
from mpidist.values import IndexedSlices, local_component


def has_slices(value: Any) -> bool:
    """Return whether some leaves, or components of some, are IndexedSlices."""
    return any(
        isinstance(local_component(leaf), IndexedSlices)
        for leaf in nest.flatten(value)[0]
    )


def reduce_slices(
    state: CollectiveContext,
    operation: str,
    reduce_op: ReduceOp | str,
    value: Any,
    options: CommunicationOptions,
    reduce_dense: Callable[[ReduceOp, list[Any]], list[Any]],
) -> Any:
    """Return the reduction of a nest, in which other leaves are arrays. Collective.

    Args:
      state: of the strategy.
      operation: the public call that this is.
      reduce_op: SUM or MEAN, over the replicas.
      value: the nest.
      options: see `CommunicationOptions`.
      reduce_dense: reduces the other leaves. Collective.
    """
    consensus, name = state.consensus, f"{operation} of IndexedSlices"

    def prepare() -> tuple[ReduceOp, list[Any], Any, list[int], list[Any], Any]:
        op = ReduceOp.parse(reduce_op)
        if not op.adds:
            raise ArgumentError(
                f"IndexedSlices can be reduced with SUM and MEAN, not {op.name}"
            )
        leaves, spec = nest.flatten(nest.map_leaves(local_component, value))
        sparse = [i for i, a in enumerate(leaves) if isinstance(a, IndexedSlices)]
        inputs: list[Any] = []
        for i in sparse:
            inputs += _take_slices(state, leaves[i])
        shapes = tuple(_shape_of(leaves[i].dense_shape) for i in sparse)
        return op, leaves, spec, sparse, inputs, shapes

    with consensus.call(name) as call:
        op, leaves, spec, sparse, inputs, shapes = call.reserve(prepare)
        agreed = (
            ("reduce_op", op.name),
            ("the structure", str(spec)),
            ("dense_shape", shapes),
            *option_fields(options),
        )
        described = describe_but(inputs, [0] * len(inputs))
        signature = CallSignature(name, agreed, nest.flatten(inputs)[1], described)
        sparse_call = consensus.call(signature, options.timeout_seconds)
        plan = plan_gather(state, sparse_call, inputs, [0] * len(inputs), options)
        gathered = execute_gather(state, plan, inputs)
        results: list[Any] = list(leaves)

        def join() -> None:
            for i, values, indices in zip(sparse, gathered[::2], gathered[1::2]):
                results[i] = _join(state, op, leaves[i], values, indices)

        if sum(array.nbytes for array in gathered) < packing.LARGE_BYTES:
            with_spare(join)
        else:
            call.finish(join)
    # A collective of its own, within the call that `all_reduce` has opened
    dense = [i for i in range(len(leaves)) if i not in set(sparse)]
    if dense:
        reduced = reduce_dense(op, [leaves[i] for i in dense])
        for i, result in zip(dense, reduced, strict=True):
            results[i] = result
    return nest.unflatten(spec, results)


def _take_slices(state: CollectiveContext, slices: IndexedSlices) -> Sequence[Any]:
    values = arrays.to_array(slices.values, "values of IndexedSlices")
    indices = arrays.to_array(slices.indices, "indices of IndexedSlices")
    state.transports.require_reachable(values, "values of IndexedSlices")
    state.transports.require_reachable(indices, "indices of IndexedSlices")
    if not is_integer(indices.dtype):
        raise DTypeError(
            f"indices of IndexedSlices must be integers, not {indices.dtype.name}"
        )
    accumulator_dtype(values.dtype, "values of IndexedSlices")
    if not values.ndim or indices.ndim != 1:
        raise ArgumentError(
            "values of IndexedSlices need a first dimension, of rows, and indices "
            f"one dimension; not shapes {values.shape} and {indices.shape}"
        )
    if len(values) != len(indices):
        raise ArgumentError(
            f"IndexedSlices have {len(indices)} indices for {len(values)} rows"
        )
    return values, indices


def _shape_of(dense_shape: Any) -> tuple[int, ...] | None:
    if dense_shape is None:
        return None
    shape = list(dense_shape) if isinstance(dense_shape, tuple) else dense_shape
    lengths = arrays.to_host(arrays.to_tensor(shape, "dense_shape"))
    if lengths.ndim != 1 or (lengths.size and not is_integer(lengths.dtype)):
        raise ArgumentError(
            "dense_shape of IndexedSlices must be a list of integers, not "
            f"{validation.shown(dense_shape)}"
        )
    return tuple(lengths.tolist())


def _join(
    state: CollectiveContext,
    op: ReduceOp,
    inputs: IndexedSlices,
    values: Any,
    indices: Any,
) -> IndexedSlices:
    if op.rule.divides:
        out = op.rule.result(values.dtype)
        # Each rank's rows are divided by the number of ranks: the sum of rows with
        # equal indices is the mean.
        wide = values.astype(accumulator_dtype(out), copy=False)
        values = (wide / state.consensus.size).astype(out, copy=False)
    return IndexedSlices(
        arrays.like(values, inputs.values),
        arrays.like(indices, inputs.indices),
        inputs.dense_shape,
    )
