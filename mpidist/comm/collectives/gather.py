"""Gathering arrays whose lengths along an axis differ from rank to rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic, packing
from mpidist.comm.collectives.arguments import (
    axis_field,
    deadline_of,
    describe_but,
    gather_axes,
    implementation_of,
    is_direct,
    option_fields,
    require_dense,
)
from mpidist.comm.collectives.counts import (
    CountPlan,
    Reader,
    exchange_counts,
    plan_counts,
)
from mpidist.comm.collectives.plans import (
    CollectiveContext,
    Message,
    detail_of,
    kind_along,
    kind_of,
    prepare_inputs,
)
from mpidist.comm.consensus.consensus import Call
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.transports.base import Transport
from mpidist.device import arrays
from mpidist.options import CommunicationOptions
from mpidist.util.last_resort import with_spare

_DEFAULT = CommunicationOptions()


class _Pack(NamedTuple):
    """Arrays of one dtype that are gathered together, and memory for the result.

    Args:
      members: their positions among the arrays that were passed.
      send: these arrays, concatenated.
      received: memory for the arrays of all ranks.
      in_places: whether each rank writes its part directly into the result.
      results: memory for the results; empty if `received` is the only one.
    """

    members: Sequence[int]
    send: Any
    received: Any
    in_places: bool
    results: Sequence[Any] = ()


class GatherPlan(NamedTuple):
    """One kind of gather.

    Args:
      counts: the exchange of the lengths, and of small arrays.
      axes: of each array.
      row_bytes: of each array, of one row along its axis.
      message: of the value; None for arrays.
    """

    counts: CountPlan
    axes: Sequence[int]
    row_bytes: Sequence[int]
    message: Message | None


def all_gather(
    state: CollectiveContext,
    operation: str,
    value: Any,
    axis: int,
    options: CommunicationOptions | None = None,
) -> Any:
    """Return the ranks' values concatenated along `axis`, on every rank.

    Lengths along `axis` may differ between ranks and may be zero; the dtype and the
    other dimensions must agree.

    Raises, on all ranks: see `all_reduce`; ArgumentError also for values without
    dimensions and an axis out of range.
    """
    kind = kind_along(axis)
    wanted = _DEFAULT if options is None else options

    def make() -> tuple[GatherPlan, list[Any], list[Any]]:
        require_dense(operation, value)
        leaves, spec, inputs = prepare_inputs(state, value, wanted)
        axes = gather_axes(axis, inputs, spec)
        agreed = axis_field(axes), *option_fields(wanted)
        signature = CallSignature(operation, agreed, spec, describe_but(inputs, axes))
        call = state.consensus.call(signature, wanted.timeout_seconds)
        message = Message.of(spec, leaves)
        plan = plan_gather(state, call, inputs, axes, wanted, message)
        return plan, leaves, inputs

    return state.plans.run(
        operation,
        None if kind is None else detail_of(axis, options),
        value,
        kind or kind_of,
        make,
        functools.partial(execute_gather, state),
    )


def plan_gather(
    state: CollectiveContext,
    call: Call,
    inputs: Sequence[Any],
    axes: Sequence[int],
    options: CommunicationOptions,
    message: Message | None = None,
) -> GatherPlan:
    """Return the plan of a gather whose arguments have been checked.

    Args:
      state: of the strategy.
      call: what the ranks agree on: dtypes and all other dimensions.
      inputs: the arrays.
      axes: of each array.
      options: see `CommunicationOptions`.
      message: of the value.
    """
    on_gpu = any(map(arrays.is_device_array, inputs))
    # Arrays that travel with the lengths must be in host memory; and if the user
    # requests MPI, MPI's own call is used.
    sends_inline = not on_gpu and not is_direct(options)
    counts = plan_counts(state, call, len(inputs), options, sends_inline)
    # Bytes of one row: lengths differ between ranks, so sizes are known only after
    # the exchange, as lengths times this.
    row_bytes = [
        math.prod(packing.without(a.shape, (i,))) * a.dtype.itemsize
        for a, i in zip(inputs, axes)
    ]
    return GatherPlan(counts, axes, row_bytes, message)


def execute_gather(
    state: CollectiveContext, plan: GatherPlan, inputs: Sequence[Any]
) -> list[Any]:
    """Return the concatenated arrays of all ranks. Collective.

    The lengths, and small arrays, are sent with the comparison of the calls. For
    large results the ranks then check that all have allocated memory.

    Raises, on all ranks: see `Consensus.require_same`.
    """
    lengths = [a.shape[i] for a, i in zip(inputs, plan.axes)]
    with plan.counts.call:
        everyone, pages = exchange_counts(state, plan.counts, lengths, inputs)
        if pages is None:
            return _gather(state, plan, inputs, np.array(everyone, np.int64))
        return with_spare(_read, plan, inputs, everyone, pages)


def _read(
    plan: GatherPlan,
    inputs: Sequence[Any],
    everyone: Sequence[Sequence[int]],
    pages: Sequence[Any],
) -> list[Any]:
    results, readers = [], list(map(Reader, pages))
    for j, (array, axis) in enumerate(zip(inputs, plan.axes)):
        before, behind = array.shape[:axis], array.shape[axis + 1 :]
        parts = [
            reader.next((*before, lengths[j], *behind), array.dtype)
            for reader, lengths in zip(readers, everyone)
        ]
        # Else a compound would lose its padding, as in no large gather
        results.append(np.concatenate(parts, axis, dtype=array.dtype))
    return results


def _gather(
    state: CollectiveContext, plan: GatherPlan, inputs: Sequence[Any], lengths: Any
) -> list[Any]:
    """Like `execute`, for arrays that were not sent with the comparison."""
    axes, options = plan.axes, plan.counts.options
    deadline = deadline_of(options)
    # Packs must be the same on all ranks, so sizes are those of the results
    lengths = lengths.reshape(state.size, len(inputs))
    # From here on all decisions follow from `rows`, which are equal on all ranks.
    rows = lengths.sum(axis=0)
    shapes = [
        packing.with_length(a.shape, i, n)
        for a, i, n in zip(inputs, axes, rows.tolist())
    ]
    sizes = (rows * plan.row_bytes).tolist()

    def reserve() -> list[_Pack]:
        return _reserve(state, inputs, axes, shapes, sizes, options)

    # A large allocation may fail on one rank alone; agree before any data moves.
    if state.size > 1 and sum(sizes) >= packing.LARGE_BYTES:
        call = plan.counts.call.step("gathering")
        packs = call.reserve(reserve)
        call.agree()
    else:
        packs = with_spare(reserve)
    results: list[Any] = [None] * len(inputs)
    for pack in packs:
        members = pack.members
        values = [inputs[j] for j in members]
        along = [axes[j] for j in members]
        if pack.in_places:
            _place(state, pack, values[0], along[0], lengths[:, members[0]], deadline)
        else:
            own = lengths[:, members]
            _gather_pack(state, pack, values, along, own, options, deadline)
        for j, result in zip(members, pack.results or [pack.received], strict=True):
            results[j] = result.reshape(shapes[j])
    return results


def _reserve(
    state: CollectiveContext,
    inputs: Sequence[Any],
    axes: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    sizes: Sequence[int],
    options: CommunicationOptions,
) -> list[_Pack]:
    """Allocate memory for gathers. Not collective."""
    packs, rest = [], []
    counts = list(map(math.prod, shapes))
    for j, (value, axis) in enumerate(zip(inputs, axes, strict=True)):
        is_large = sizes[j] >= packing.LARGE_BYTES and _outer(value, axis) > 1
        # With _outer() == 1 a plain gather puts rows in order already, so that
        # nothing is saved by placing.
        if is_large and _can_place(state, value, options):
            received = state.results.empty(counts[j], value)
            send = arithmetic.contiguous(value, value.dtype)
            packs.append(_Pack([j], send, received, True))
        else:
            rest.append(j)
    # The rest is packed by dtype, in the order in which it was given: equal on all
    # ranks.
    kinds = [packing.kind_of(inputs[j]) for j in rest]
    rest_bytes = [sizes[j] for j in rest]
    for numbers in packing.groups(kinds, rest_bytes, options.bytes_per_pack):
        members = [rest[k] for k in numbers]
        values = [inputs[j] for j in members]
        send = packing.pack([arithmetic.contiguous(v, v.dtype) for v in values])
        count = sum(counts[j] for j in members)
        results: list[Any] = []
        if len(members) > 1 or _outer(values[0], axes[members[0]]) > 1:
            xp = arrays.namespace(send)
            results = [xp.empty(shapes[j], send.dtype) for j in members]
        received = state.results.empty(count, send)
        packs.append(_Pack(members, send, received, False, results))
    return packs


def _transport(
    state: CollectiveContext, array: Any, options: CommunicationOptions
) -> Transport:
    is_device = arrays.is_device_array(array)
    return state.transports.pick(implementation_of(options), False, is_device)


def _can_place(
    state: CollectiveContext, value: Any, options: CommunicationOptions
) -> bool:
    in_node = state.transports.intra_node
    # Only ranks that share all memory can write into each other's columns.
    if in_node is None or not in_node.shares_memory or is_direct(options):
        return False
    is_small = value.dtype.itemsize < packing.LARGE_BYTES
    return isinstance(value, np.ndarray) and is_small


def _place(
    state: CollectiveContext,
    pack: _Pack,
    value: Any,
    axis: int,
    lengths: Any,
    deadline: float | None,
) -> None:
    received = pack.received
    outer = _outer(value, axis)
    inner = math.prod(value.shape[axis + 1 :])
    in_node = state.transports.intra_node
    assert in_node is not None
    state.transports.count(in_node.name, received.nbytes)
    in_node.allgather_columns(
        pack.send.reshape(outer, -1),
        received.reshape(outer, -1),
        (lengths * inner).tolist(),
        deadline,
    )


def _gather_pack(
    state: CollectiveContext,
    pack: _Pack,
    values: Sequence[Any],
    axes: Sequence[int],
    lengths: Any,
    options: CommunicationOptions,
    deadline: float | None,
) -> None:
    """Gather the arrays of a pack of one dtype.

    `lengths[r, j]` is the length of rank r's array j along `axes[j]`.
    """
    widths = [math.prod(packing.without(v.shape, (i,))) for v, i in zip(values, axes)]
    counts = (lengths * widths).sum(axis=1).tolist()
    send, received = pack.send, pack.received
    if len(counts) == 1:
        received[...] = send.reshape(-1)
    else:
        transport = _transport(state, send, options)
        transport.allgatherv(send, received, counts, deadline)
    if not pack.results:
        return  # already in the order of the result
    starts = np.cumsum([0, *counts[:-1]])
    offsets = starts[:, None] + np.cumsum(lengths * widths, axis=1)
    offsets = offsets - lengths * widths
    xp = arrays.namespace(values[0])
    for j, (value, axis, width, result) in enumerate(
        zip(values, axes, widths, pack.results)
    ):
        parts = [
            received[start : start + length * width].reshape(
                packing.with_length(value.shape, axis, length)
            )
            for start, length in zip(offsets[:, j].tolist(), lengths[:, j].tolist())
        ]
        xp.concatenate(parts, axis=axis, out=result)


def _outer(value: Any, axis: int) -> int:
    """Return the number of parts of each rank in a gathered array."""
    return math.prod(value.shape[:axis])
