"""Each rank gets a different part: `reduce_scatter` and `all_to_all`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic, packing
from mpidist.comm.collectives.arguments import (
    axis_field,
    check_each,
    deadline_of,
    describe,
    describe_but,
    gather_axes,
    option_fields,
    require_reducible,
)
from mpidist.comm.collectives.counts import (
    CountPlan,
    Reader,
    exchange_counts,
    plan_counts,
)
from mpidist.comm.collectives.plans import (
    OP_TYPES,
    CollectiveContext,
    Message,
    detail_of,
    kind_along,
    kind_of,
    prepare_inputs,
)
from mpidist.comm.collectives.reduce import (
    ReducePlan,
    fits,
    plan_reduction,
    reduce_packed,
)
from mpidist.comm.consensus.consensus import Call
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import validation
from mpidist.util.last_resort import with_spare
from mpidist.util.shares import BatchShare

_DEFAULT = CommunicationOptions()


class _SendPart(NamedTuple):
    """One array to exchange.

    Args:
      rows: the array with the axis in front, contiguous, perhaps in a wider dtype.
      lengths: how many rows go to each rank.
    """

    rows: Any
    lengths: Sequence[int]


class _ReceiveBuffer(NamedTuple):
    """Memory for what this rank receives of one array.

    Args:
      rows: what all ranks send to it, concatenated.
      result: what is returned; None if that is `rows`.
    """

    rows: Any
    result: Any


class ExchangePlan(NamedTuple):
    """One kind of `all_to_all` or `reduce_scatter`.

    Args:
      call: what the ranks agree on.
      options: see `CommunicationOptions`.
      message: of the value.
      axes: of each leaf.
      divided: rows of each leaf for each rank, if ranks agree on them.
      counts: otherwise the exchange of these numbers, and of small arrays.
      op: of `reduce_scatter`.
      out: the dtypes of its results.
      packed: the reduction of small arrays with the comparison; None for large arrays.
    """

    call: Call
    options: CommunicationOptions
    message: Message
    axes: Sequence[int]
    divided: Sequence[Sequence[int]] = ()
    counts: CountPlan | None = None
    op: ReduceOp | None = None
    out: Sequence[np.dtype[Any]] = ()
    packed: ReducePlan | None = None


def all_to_all(
    state: CollectiveContext,
    operation: str,
    value: Any,
    axis: int,
    lengths: Sequence[int] | None,
    options: CommunicationOptions | None,
) -> Any:
    """See `ReplicaContext.all_to_all`. Collective."""
    kind, wanted = kind_along(axis), _DEFAULT if options is None else options

    def make() -> tuple[ExchangePlan, list[Any], list[Any]]:
        # Runs once per kind of call; later calls find the plan by their key.
        leaves, spec, inputs = prepare_inputs(state, value, wanted)
        axes = gather_axes(axis, inputs, spec)
        # The axis may differ in sign between ranks, but not in meaning: agree on
        # the positive one. Lengths along it may differ, so they are left out of the
        # shapes.
        agreed = axis_field(axes), *option_fields(wanted)
        signature = CallSignature(operation, agreed, spec, describe_but(inputs, axes))
        call = state.consensus.call(signature, wanted.timeout_seconds)
        # Small arrays travel with the exchange of the counts, except GPU arrays,
        # which would have to be copied to the host first.
        sends_inline = not any(map(arrays.is_device_array, inputs))
        count = state.consensus.size * len(inputs)
        counts = plan_counts(state, call, count, wanted, sends_inline)
        message = Message.of(spec, leaves)
        plan = ExchangePlan(call, wanted, message, axes, counts=counts)
        return plan, leaves, inputs

    return state.plans.run(
        operation,
        None if kind is None else detail_of(axis, options),
        value,
        kind or kind_of,
        make,
        lambda plan, inputs: _send(state, plan, inputs, lengths),
    )


def _send(
    state: CollectiveContext, plan: ExchangePlan, inputs: Sequence[Any], lengths: Any
) -> Any:
    """Return this rank's parts of all ranks' arrays. Collective."""
    ranks, counts = state.consensus.size, plan.counts
    assert counts is not None

    def prepare() -> list[_SendPart]:
        pairs = zip(inputs, plan.axes)
        divided = [_divide(state, a.shape[i], lengths) for a, i in pairs]
        rows = map(_rows_first, inputs, plan.axes)
        return list(map(_SendPart, rows, divided))

    with plan.call as call:
        pieces = call.reserve(prepare)
        own = list(itertools.chain.from_iterable(p.lengths for p in pieces))
        everyone, pages = exchange_counts(
            state, counts, own, [piece.rows for piece in pieces]
        )
        if pages is not None:
            return with_spare(_read_rows, state, plan, pieces, everyone, pages)
        # The arrays were too large to travel with the counts. By leaf, of each rank
        # how many rows it sends to each rank
        table = np.array(everyone, np.int64).reshape(ranks, len(pieces), ranks)
        by_leaf = list(table.swapaxes(0, 1))

        def reserve() -> list[_ReceiveBuffer]:
            return list(
                map(functools.partial(_reserve, state), pieces, by_leaf, plan.axes)
            )

        # Allocating much may fail on one rank, so the ranks agree after it. The
        # sizes are equal on all ranks, so all take the same branch.
        sizes = map(_largest, pieces, by_leaf)
        if ranks > 1 and sum(sizes) >= packing.LARGE_BYTES:
            memory = call.step("exchanging")
            places = memory.reserve(reserve)
            memory.agree()
        else:
            places = with_spare(reserve)
        _receive(state, pieces, by_leaf, places, deadline_of(plan.options))
        return [
            _put(place.rows, place.result, i)
            for place, i in zip(places, plan.axes, strict=True)
        ]


def _read_rows(
    state: CollectiveContext,
    plan: ExchangePlan,
    pieces: Sequence[_SendPart],
    everyone: Sequence[Sequence[int]],
    pages: Sequence[Any],
) -> list[Any]:
    rank, ranks = state.consensus.rank, state.consensus.size
    received, readers = [], list(map(Reader, pages))
    for j, (rows, _) in enumerate(pieces):
        parts = []
        for reader, row_counts in zip(readers, everyone):
            to = row_counts[j * ranks : (j + 1) * ranks]
            sent = reader.next((sum(to), *rows.shape[1:]), rows.dtype)
            # Rows for ranks before this one come first in what rank r sent.
            begin = sum(to[:rank])
            parts.append(sent[begin : begin + to[rank]])
        received.append(np.concatenate(parts, dtype=rows.dtype))
    return list(map(_axis_back, received, plan.axes))


def reduce_scatter(
    state: CollectiveContext,
    operation: str,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: int,
    lengths: Sequence[int] | None,
    options: CommunicationOptions | None,
) -> Any:
    """See `ReplicaContext.reduce_scatter`. Collective."""
    wanted, detail = _DEFAULT if options is None else options, None
    # A plan may be kept only if its key is hashable and `lengths` is the default.
    is_known = type(axis) is int and isinstance(reduce_op, OP_TYPES)
    if is_known and lengths is None:
        detail = detail_of((reduce_op, axis), options)

    def make() -> tuple[ExchangePlan, list[Any], list[Any]]:
        op = ReduceOp.parse(reduce_op)
        leaves, spec, inputs = prepare_inputs(state, value, wanted)
        require_reducible(op, inputs, spec)
        axes = gather_axes(axis, inputs, spec)
        # Here lengths must agree, unlike in all_to_all: rank r's part is the same
        # rows of all arrays.
        divided = [_divide(state, a.shape[i], lengths) for a, i in zip(inputs, axes)]
        fields = (
            ("reduce_op", op.name),
            axis_field(axes),
            ("lengths", tuple(map(tuple, divided))),
            *option_fields(wanted),
        )
        signature = CallSignature(operation, fields, spec, describe(inputs))
        call = state.consensus.call(signature, wanted.timeout_seconds)
        message = Message.of(spec, leaves)
        out, _ = arithmetic.dtypes_to_add(op, [a.dtype for a in inputs])
        packed = None
        if fits(state, op, inputs, wanted):
            packed = plan_reduction(state, call, op, wanted, message, inputs)
        plan = ExchangePlan(
            call, wanted, message, axes, divided, op=op, out=out, packed=packed
        )
        return plan, leaves, inputs

    return state.plans.run(
        operation, detail, value, kind_of, make, functools.partial(_reduce, state)
    )


def _reduce(
    state: CollectiveContext, plan: ExchangePlan, inputs: Sequence[Any]
) -> list[Any]:
    """Return this rank's parts of the reductions. Collective."""
    consensus, op = state.consensus, plan.op
    if plan.packed is not None:
        totals, parts = reduce_packed(state, plan.packed, inputs), []
        # All ranks have the whole total already; each keeps its slice, as a copy,
        # so that it does not keep the total alive.
        for total, i, lengths in zip(totals, plan.axes, plan.divided):
            begin = sum(lengths[: consensus.rank])
            own = slice(begin, begin + lengths[consensus.rank])
            parts.append(total[(slice(None),) * i + (own,)].copy())
        return parts
    assert op is not None

    is_risky = arithmetic.may_not_fit(op, plan.out)
    everyone = [np.array([part] * consensus.size) for part in plan.divided]

    def prepare() -> tuple[list[_SendPart], list[_ReceiveBuffer]]:
        rows = list(map(_rows_first, inputs, plan.axes))
        _, wide = arithmetic.to_add(op, rows)
        pieces = list(map(_SendPart, wide, plan.divided))
        places = map(
            functools.partial(_reserve, state), pieces, everyone, plan.axes, plan.out
        )
        return pieces, list(places)

    def combine(place: _ReceiveBuffer, name: str) -> Any:
        # What was received is one part of each rank, all of the same shape, as
        # every rank sends this rank the same rows.
        rows = place.rows
        shape = len(rows) // consensus.size, *rows.shape[1:]
        parts = list(rows.reshape(consensus.size, *shape))
        total = _combine(op, parts, f"{name} on rank {consensus.rank}")
        if op.rule.divides:
            # True division, so a mean of integers is a float; no rank divides
            # before adding.
            total /= consensus.size
        return total

    def finish() -> list[Any]:
        totals = check_each(places, plan.message.spec, combine)
        return [
            _put(total, place.result, i)
            for total, place, i in zip(totals, places, plan.axes, strict=True)
        ]

    with plan.call as call:
        pieces, places = call.reserve(prepare)
        call.agree()
        _receive(state, pieces, everyone, places, deadline_of(plan.options))
        # Only sums and products of integers can fail after the exchange, and on one
        # rank alone, as each has another part: the ranks must agree once more.
        return call.finish(finish) if is_risky else finish()


def _divide(state: CollectiveContext, rows: int, lengths: Any) -> list[int]:
    ranks = state.consensus.size
    if lengths is None:
        slices = [BatchShare(ranks, rank).of(rows) for rank in range(ranks)]
        return [part.stop - part.start for part in slices]
    if isinstance(lengths, str | bytes) or not hasattr(lengths, "__len__"):
        raise ArgumentTypeError(
            "lengths must be a list with the number of rows for each replica, not "
            f"{validation.shown(lengths)}"
        )
    sizes = [validation.integer("each of lengths", n, 0) for n in lengths]
    if len(sizes) != ranks or sum(sizes) != rows:
        raise ArgumentError(
            f"lengths must be {ranks} numbers, one for each replica, that add up "
            f"to the {rows} rows along the axis, not {validation.shown(lengths)}"
        )
    return sizes


def _reserve(
    state: CollectiveContext,
    piece: _SendPart,
    lengths: Any,
    axis: int,
    dtype: Any = None,
) -> _ReceiveBuffer:
    """Return memory for what this rank receives of an array.

    Args:
      state: of the strategy.
      piece: the array.
      lengths: `lengths[r, s]` is the number of rows that rank r sends to rank s.
      axis: where the rows' axis belongs in the result.
      dtype: of the sum of what all ranks send; None to concatenate it.
    """
    send, own = piece.rows, lengths[:, state.consensus.rank].tolist()
    xp, shape = arrays.namespace(send), send.shape[1:]
    rows = xp.empty((sum(own), *shape), send.dtype)
    count = sum(own) if dtype is None else own[0]
    # A sum is not a view of `rows`, which would keep all of them
    if dtype is None and not axis:
        return _ReceiveBuffer(rows, None)
    shape = (*shape[:axis], count, *shape[axis:])
    return _ReceiveBuffer(rows, xp.empty(shape, send.dtype if dtype is None else dtype))


def _receive(
    state: CollectiveContext,
    pieces: Sequence[_SendPart],
    everyone: Sequence[Any],
    places: Sequence[_ReceiveBuffer],
    deadline: float | None,
) -> None:
    """Receive this rank's rows from all ranks, in rank order. Collective.

    `everyone[j]`: see `_reserve`, of leaf j.
    """
    rank = state.consensus.rank
    for piece, lengths, place in zip(pieces, everyone, places, strict=True):
        width = math.prod(piece.rows.shape[1:])
        size = _largest(piece, lengths)
        if state.consensus.size == 1:
            # A copy, as results of several ranks never alias the arguments either.
            place.rows[...] = piece.rows
        elif size:
            counts_to = (lengths[rank] * width).tolist()
            counts_from = (lengths[:, rank] * width).tolist()
            _move(state, piece.rows, counts_to, place.rows, counts_from, size, deadline)


def _move(
    state: CollectiveContext,
    send: Any,
    counts_to: Sequence[int],
    receive: Any,
    counts_from: Sequence[int],
    size: int,
    deadline: float | None,
) -> None:
    transport = state.transports.with_alltoallv(arrays.is_device_array(send))
    if transport is not None:
        # In pieces if any rank sends or gets more than MPI counts in 32 bits:
        # `size` is the maximum over all ranks, so that all choose the same transport.
        is_large = size > transport.most_bytes
        state.transports.count(transport.name, receive.nbytes)
        transport.alltoallv(
            send, counts_to, receive, counts_from, deadline, is_large=is_large
        )
        return
    host = np.empty(receive.shape, receive.dtype)
    transport = state.transports.with_alltoallv(is_device=False)
    assert transport is not None
    here, is_large = arrays.to_host(send), size > transport.most_bytes
    state.transports.count(transport.name, receive.nbytes)
    transport.alltoallv(here, counts_to, host, counts_from, deadline, is_large=is_large)
    receive[...] = arrays.to_device_like(host, receive)


def _rows_first(array: Any, axis: int) -> Any:
    moved = arrays.namespace(array).moveaxis(array, axis, 0)
    return arithmetic.contiguous(moved, array.dtype)


def _axis_back(rows: Any, axis: int) -> Any:
    xp = arrays.namespace(rows)
    return xp.ascontiguousarray(xp.moveaxis(rows, 0, axis))


def _largest(piece: _SendPart, lengths: Any) -> int:
    """Return the most bytes that any rank sends or gets; see `_reserve`."""
    width = math.prod(piece.rows.shape[1:]) * piece.rows.dtype.itemsize
    return int(width * max(lengths.sum(axis=0).max(), lengths.sum(axis=1).max()))


def _put(rows: Any, result: Any, axis: int) -> Any:
    """Return rows in the memory of the result; themselves if there is none."""
    if result is None:
        return rows
    arrays.namespace(result).moveaxis(result, axis, 0)[...] = rows
    return result


def _combine(op: ReduceOp, parts: Sequence[Any], name: str) -> Any:
    """Return the reduction of parts, without the division of a mean.

    Parts that integers do not overflow in are overwritten.
    """
    if len(parts) == 1:
        return parts[0]
    is_risky = arithmetic.may_not_fit(op, [parts[0].dtype])
    out = None if is_risky else parts[0]
    total = arithmetic.combine_in_order(op.rule.combine, parts, out)
    return arithmetic.check(op, (total, parts), name)
