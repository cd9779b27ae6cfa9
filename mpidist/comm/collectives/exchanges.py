"""Each rank gets another part: `reduce_scatter` and `all_to_all`."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic
from mpidist.comm.collectives.arguments import (
    axis_field,
    check_each,
    deadline_of,
    describe,
    describe_but,
    gather_axis,
    option_fields,
)
from mpidist.comm.collectives.over_axis import Take
from mpidist.comm.consensus.agreement import Agreement
from mpidist.comm.consensus.calls import Call
from mpidist.comm.transports.selector import Routes
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util import nest, validation

__all__ = ["Exchanges"]

# Ranks agree once more before they move so many bytes, that all have room for them
_LARGE_BYTES = 256 << 10


class _Piece(NamedTuple):
    """One array to exchange.

    Args:
      rows: the array with the axis in front, contiguous, perhaps in a wider dtype.
      lengths: how many rows go to each rank.
    """

    rows: Any
    lengths: Sequence[int]


class Exchanges:
    """The exchanges of one strategy.

    Args:
      agreement: of all ranks.
      routes: the transports.
      take: checks a value, and takes it apart.
    """

    def __init__(self, agreement: Agreement, routes: Routes, take: Take):
        self._agreement = agreement
        self._routes = routes
        self._take = take

    def all_to_all(
        self,
        operation: str,
        value: Any,
        axis: int,
        lengths: Sequence[int] | None,
        options: CommunicationOptions,
    ) -> Any:
        """See `ReplicaContext.all_to_all`. Collective."""
        agreement = self._agreement

        def prepare() -> tuple[Any, ...]:
            leaves, spec, given = self._take(value, options)
            axes = check_each(
                given, spec, lambda a, name: gather_axis(axis, a.ndim, name)
            )
            divided = [self._divide(a.shape[i], lengths) for a, i in zip(given, axes)]
            rows = map(_rows_first, given, axes)
            return leaves, spec, given, axes, list(map(_Piece, rows, divided))

        with agreement.turns:
            prepared = agreement.prepare(operation, prepare)
            leaves, spec, given, axes, pieces = prepared
            agreed = (axis_field(axes), *option_fields(options))
            call = Call(operation, agreed, spec, describe_but(given, axes))
            agreement.require_same(call, timeout=options.timeout_seconds)
            deadline = deadline_of(options)
            # By leaf, of each rank how many rows it sends to each rank
            everyone = self._gather_lengths([p.lengths for p in pieces], deadline)
            received = self._receive(operation, pieces, everyone, options, deadline)
        xp = arrays.namespace
        results = [
            xp(rows).ascontiguousarray(xp(rows).moveaxis(rows, 0, i))
            for rows, i in zip(received, axes, strict=True)
        ]
        return nest.unflatten(spec, map(arrays.like, results, leaves))

    def reduce_scatter(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int,
        lengths: Sequence[int] | None,
        options: CommunicationOptions,
    ) -> Any:
        """See `ReplicaContext.reduce_scatter`. Collective."""
        agreement = self._agreement

        def prepare() -> tuple[Any, ...]:
            op = ReduceOp.parse(reduce_op)
            leaves, spec, given = self._take(value, options)
            check = functools.partial(arithmetic.require_reducible, op)
            check_each(given, spec, lambda a, name: check(a.dtype, name))
            axes = check_each(
                given, spec, lambda a, name: gather_axis(axis, a.ndim, name)
            )
            divided = [self._divide(a.shape[i], lengths) for a, i in zip(given, axes)]
            rows = list(map(_rows_first, given, axes))
            out, wide = arithmetic.to_add(op, rows)
            return op, leaves, spec, given, axes, list(map(_Piece, wide, divided)), out

        with agreement.turns:
            prepared = agreement.prepare(operation, prepare)
            op, leaves, spec, given, axes, pieces, out = prepared
            divided = tuple(tuple(piece.lengths) for piece in pieces)
            agreed = ("reduce_op", op.name), axis_field(axes), ("lengths", divided)
            fields = (*agreed, *option_fields(options))
            call = Call(operation, fields, spec, describe(given))
            agreement.require_same(call, timeout=options.timeout_seconds)
            deadline = deadline_of(options)
            everyone = [np.array([p.lengths] * agreement.size) for p in pieces]
            received = self._receive(operation, pieces, everyone, options, deadline)

            def combine(rows: Any, name: str) -> Any:
                shape = len(rows) // agreement.size, *rows.shape[1:]
                parts = list(rows.reshape(agreement.size, *shape))
                return _combine(op, parts, f"{name} on rank {agreement.rank}")

            # Integers may not fit on one rank alone
            def combine_all() -> list[Any]:
                return check_each(received, spec, combine)

            if op is not ReduceOp.PRODUCT and not arithmetic.is_integer_sum(op, out):
                totals = combine_all()
            else:
                totals = agreement.prepare(operation, combine_all)
                agreement.require_same(Call(operation, (("step", "checking"),)))
        results = []
        for total, dtype, i in zip(totals, out, axes, strict=True):
            xp = arrays.namespace(total)
            if op is ReduceOp.MEAN:
                total = total / agreement.size
            total = total.astype(dtype, copy=False)
            results.append(xp.ascontiguousarray(xp.moveaxis(total, 0, i)))
        return nest.unflatten(spec, map(arrays.like, results, leaves))

    def _divide(self, rows: int, lengths: Any) -> list[int]:
        """Return how many rows each rank gets: by default the same, or almost."""
        ranks = self._agreement.size
        if lengths is None:
            share = -(-rows // ranks)
            starts = [min(rank * share, rows) for rank in range(ranks + 1)]
            return [stop - start for start, stop in itertools.pairwise(starts)]
        if isinstance(lengths, str | bytes) or not hasattr(lengths, "__len__"):
            raise ArgumentTypeError(
                "lengths must be a list of how many rows each replica gets, not "
                f"{validation.shown(lengths)}"
            )
        found = [validation.integer("each of lengths", n, 0) for n in lengths]
        if len(found) != ranks or sum(found) != rows:
            raise ArgumentError(
                f"lengths must be {ranks} numbers, one for each replica, that add up "
                f"to the {rows} rows along the axis, not {validation.shown(lengths)}"
            )
        return found

    def _gather_lengths(
        self, lengths: Sequence[Sequence[int]], deadline: float | None
    ) -> list[Any]:
        """Return, by leaf, `found[r, s]`: how many rows rank r sends to rank s."""
        ranks = self._agreement.size
        mine = np.array(lengths, np.int64).reshape(len(lengths), ranks)
        if ranks == 1:
            return list(mine[:, None])
        everyone = np.empty((ranks, len(lengths), ranks), np.int64)
        way = self._routes.exchange(is_device=False)
        assert way is not None
        way.allgatherv(mine, everyone, [mine.size] * ranks, deadline)
        return list(everyone.swapaxes(0, 1))

    def _receive(
        self,
        operation: str,
        pieces: Sequence[_Piece],
        everyone: Sequence[Any],
        options: CommunicationOptions,
        deadline: float | None,
    ) -> list[Any]:
        """Return this rank's rows of all ranks, by their order. Collective."""
        agreement, rank = self._agreement, self._agreement.rank

        def reserve() -> list[Any]:
            return [
                arrays.namespace(piece.rows).empty(
                    (int(lengths[:, rank].sum()), *piece.rows.shape[1:]),
                    piece.rows.dtype,
                )
                for piece, lengths in zip(pieces, everyone, strict=True)
            ]

        widths = [
            math.prod(piece.rows.shape[1:]) * piece.rows.dtype.itemsize
            for piece in pieces
        ]
        # The most that any rank sends or gets
        sizes = [
            width * int(max(lengths.sum(axis=0).max(), lengths.sum(axis=1).max()))
            for width, lengths in zip(widths, everyone, strict=True)
        ]
        if agreement.size == 1:
            return [piece.rows.copy() for piece in pieces]
        if sum(sizes) >= _LARGE_BYTES:
            received = agreement.prepare(operation, reserve)
            call = Call(operation, (("step", "exchanging"),))
            agreement.require_same(call, timeout=options.timeout_seconds)
        else:
            received = reserve()
        for piece, lengths, place, size in zip(
            pieces, everyone, received, sizes, strict=True
        ):
            width = math.prod(piece.rows.shape[1:])
            counts = (
                (lengths[rank] * width).tolist(),
                (lengths[:, rank] * width).tolist(),
            )
            self._move(piece.rows, counts[0], place, counts[1], size, deadline)
        return received

    def _move(
        self,
        send: Any,
        counts_to: Sequence[int],
        receive: Any,
        counts_from: Sequence[int],
        size: int,
        deadline: float | None,
    ) -> None:
        way = self._routes.exchange(arrays.is_device_array(send))
        if way is not None:
            is_large = size > way.most_bytes
            way.alltoallv(
                send, counts_to, receive, counts_from, deadline, is_large=is_large
            )
            return
        # By way of the host
        host = np.empty(receive.shape, receive.dtype)
        way = self._routes.exchange(is_device=False)
        assert way is not None
        here, is_large = arrays.to_host(send), size > way.most_bytes
        way.alltoallv(here, counts_to, host, counts_from, deadline, is_large=is_large)
        receive[...] = arrays.to_device_like(host, receive)


def _rows_first(array: Any, axis: int) -> Any:
    """Return an array with one axis in front, contiguous and aligned."""
    moved = arrays.namespace(array).moveaxis(array, axis, 0)
    return arithmetic.contiguous(moved, array.dtype)


def _combine(op: ReduceOp, parts: Sequence[Any], name: str) -> Any:
    """Return the reduction of parts, but for the division of a mean."""
    if len(parts) == 1:
        return parts[0]
    if op.adds:
        total, check = arithmetic.add_in_order(parts), arithmetic.check_sum
    else:
        total = arithmetic.combine_in_order(op, parts)
        check = arithmetic.check_product
    is_exact = op in (ReduceOp.MIN, ReduceOp.MAX)
    return total if is_exact else check((total, parts), name)
