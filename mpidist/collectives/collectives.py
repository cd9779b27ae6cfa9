"""Collectives on nests of arrays: check, convert, pack, move, unpack, give back.

Each method is collective over the strategy's ranks. The leaves of one dtype travel
together, so a nest costs one MPI call per dtype (and per `bytes_per_pack`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist import arithmetic, arrays, nest, packing
from mpidist.agreement.agree import Agreement
from mpidist.agreement.calls import Call, digest
from mpidist.collectives import gathering
from mpidist.collectives.leaves import check_each, describe_but, gather_axis, to_arrays
from mpidist.memory.buffers import Buffers
from mpidist.options import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)
from mpidist.packing import Axis
from mpidist.transports import Routes, Transport

__all__ = ["Collectives", "Reduction", "Summation"]

Summation = Callable[[Sequence[Any], CommunicationOptions], list[Any]]
Reduction = Callable[[ReduceOp, Sequence[Any], CommunicationOptions], list[Any]]
_DEFAULT = CommunicationOptions()
# New memory of so many bytes costs more than to look for some that is free
_LARGE_BYTES = 128 << 10
_BUFFERS = 4
_KNOWN = 1000  # calls that are remembered
_NAMES = (str, ReduceOp)  # these can be looked up; what else there may be is an error


class KnownCall(NamedTuple):
    """An all-reduce of one array that was checked before.

    Args:
      call: what the ranks compare.
      number: its digest.
      fits: see `Collectives._fits`.
      is_mean: whether the mean is wanted.
    """

    call: Call
    number: int
    fits: bool
    is_mean: bool


class Collectives:
    """The collectives of one strategy.

    Args:
      agreement: of all ranks.
      routes: the transports.
    """

    def __init__(self, agreement: Agreement, routes: Routes):
        self.agreement = agreement
        self.routes = routes
        self.transport = routes.default
        self.size = agreement.size
        self._buffers = Buffers(_BUFFERS)
        self._known: dict[Any, KnownCall] = {}

    def all_reduce(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        reduce_arrays: Reduction | None = None,
    ) -> Any:
        """Return the elementwise sum or mean of `value` over all ranks, on every rank.

        Args:
          operation: the public call that this is, for messages.
          reduce_op: the operation, or its name.
          value: a nest of arrays or numbers, of equal structure, shapes and dtypes.
          options: see `CommunicationOptions`.
          reduce_arrays: what does the work, once all is checked: by default
            `reduce_arrays`.

        Raises, on all ranks: see `Agreement.require_same` and `arrays.to_array`.
        """
        kind = None
        is_plain = options is None and reduce_arrays is None
        if is_plain and type(value) is np.ndarray and type(reduce_op) in _NAMES:
            kind = operation, reduce_op, value.dtype, value.shape
            if (known := self._known.get(kind)) is not None:
                return self._reduce_known(known, value)
        options = options or _DEFAULT

        def prepare() -> tuple[ReduceOp, list[Any], nest.Spec, list[Any]]:
            op = ReduceOp.parse(reduce_op)
            leaves, spec, given = to_arrays(value)
            check_each(given, spec, lambda a, name: arrays.summable(a.dtype, name))
            return op, leaves, spec, given

        with self.agreement.turns:
            op, leaves, spec, given = self.agreement.prepare(operation, prepare)
            described = tuple((a.dtype, a.shape) for a in given)
            agreed = (("reduce_op", op.name), *_agreed(options))
            call = Call(operation, agreed, spec, described)
            fits = reduce_arrays is None and self._fits(op, given, options)
            if fits:
                results = self._reduce_small(op, given, call, options)
            else:
                self.agreement.require_same(call, timeout=options.timeout_seconds)
                results = (reduce_arrays or self.reduce_arrays)(op, given, options)
        if kind is not None and self._is_simple(op, value):
            self._known[kind] = KnownCall(call, digest(call), fits, op is ReduceOp.MEAN)
        return nest.unflatten(spec, map(arrays.like, results, leaves))

    def _is_simple(self, op: ReduceOp, value: Any) -> bool:
        """Return whether an array is added up in its own dtype, as is the result."""
        if self.size == 1 or not value.ndim or not value.dtype.isnative:
            return False
        if len(self._known) > _KNOWN:
            return False
        out, partial = arithmetic.to_add(op, [value])
        return out == [value.dtype] and partial[0].dtype == value.dtype

    def _reduce_known(self, known: KnownCall, value: Any) -> Any:
        """Return what `all_reduce` does for an array like one that it had before."""
        agreement = self.agreement
        with agreement.turns:
            if known.fits:
                parts = agreement.exchange(known.call, known.number, value)
                total = arithmetic.add_in_order(parts)
            else:
                agreement.compare(known.call, known.number)
                send = arithmetic.contiguous(value, value.dtype)
                total = self._empty(send.size, send).reshape(send.shape)
                self.transport.allreduce_sum(send, total, None)
        if known.is_mean:
            total /= self.size
        return total

    def _fits(
        self, op: ReduceOp, given: Sequence[Any], options: CommunicationOptions
    ) -> bool:
        """Return whether the ranks can exchange arrays while they compare their calls.

        That depends only on what must be the same on all ranks.
        """
        limit = self.agreement.comparison.payload_bytes
        if limit == 0 or self.size == 1 or self._is_direct(options):
            return False
        return arithmetic.bound_bytes(op, given) <= limit

    def _is_direct(self, options: CommunicationOptions) -> bool:
        return options.implementation is CommunicationImplementation.MPI

    def _transport(self, options: CommunicationOptions) -> Transport:
        return self.routes.pick(self._is_direct(options), is_ordered=False)

    def _reduce_small(
        self,
        op: ReduceOp,
        given: Sequence[Any],
        call: Call,
        options: CommunicationOptions,
    ) -> list[Any]:
        """Return the reductions of small host arrays, added up in rank order."""
        out, partial = arithmetic.to_add(op, given)
        agreement, timeout = self.agreement, options.timeout_seconds
        agreement.require_same(call, timeout=timeout, payload=partial)
        totals = list(
            map(arithmetic.add_in_order, agreement.comparison.payloads(partial))
        )
        return arithmetic.finish(op, totals, out, self.size)

    def reduce_arrays(
        self,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
        sum_arrays: Summation | None = None,
    ) -> list[Any]:
        """Return the reductions of arrays that were checked before.

        float16 and bfloat16 are added up in float32, the mean of integers in float64.
        """
        out, partial = arithmetic.to_add(op, values)
        totals = (sum_arrays or self.sum_arrays)(partial, options)
        return arithmetic.finish(op, totals, out, self.size)

    def reduce_over_axis(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: Axis,
        options: CommunicationOptions | None = None,
        sum_arrays: Summation | None = None,
    ) -> Any:
        """Return the sum or mean over `axis` and over all ranks, on every rank.

        Lengths along `axis` may differ between ranks and may be zero; the other
        dimensions must agree. A mean is the sum of all elements over the sum of all
        lengths, and nan where that is zero. Floating values are added up in double
        precision, integers in 64 bits; the result has the dtype of `value` (a mean of
        integers is float64).

        Raises, on all ranks: see `all_reduce`; also ArgumentError for an axis out of
        range or a sum of integers that does not fit their dtype, and
        ArgumentTypeError for an axis that is no integer.
        """
        options = options or _DEFAULT

        def prepare() -> Any:
            op = ReduceOp.parse(reduce_op)
            leaves, spec, given = to_arrays(value)
            check_each(given, spec, lambda a, name: arrays.summable(a.dtype, name))
            axes = check_each(
                given, spec, lambda a, name: packing.normalize_axes(axis, a.ndim, name)
            )
            partial = [arithmetic.sum_over(a, drop) for a, drop in zip(given, axes)]
            return op, leaves, spec, given, axes, partial

        prepared = self.agreement.prepare(operation, prepare)
        op, leaves, spec, given, axes, partial = prepared
        described = tuple((a.dtype, p.shape) for a, p in zip(given, partial))
        agreed = (("reduce_op", op.name), _axes(axes), *_agreed(options))
        call = Call(operation, agreed, spec, described)
        # Sums and lengths travel together
        lengths = [math.prod(a.shape[i] for i in drop) for a, drop in zip(given, axes)]
        partial.append(np.array(lengths))
        with self.agreement.turns:
            self.agreement.require_same(call, timeout=options.timeout_seconds)
            totals = (sum_arrays or self.sum_arrays)(partial, options)
        *totals, total_lengths = totals
        if op is ReduceOp.MEAN:
            results = [
                arithmetic.mean_of(total, length, a.dtype)
                for total, length, a in zip(totals, total_lengths.tolist(), given)
            ]
        else:
            pairs = [(total, a.dtype) for total, a in zip(totals, given)]
            results = check_each(pairs, spec, arithmetic.narrow)
        # As NumPy's sum does, give an array scalar where no dimension is left
        results = [arrays.like(r[()], leaf) for r, leaf in zip(results, leaves)]
        return nest.unflatten(spec, results)

    def all_gather(
        self,
        operation: str,
        value: Any,
        axis: int,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the ranks' values one behind the other along `axis`, on every rank.

        Lengths along `axis` may differ between ranks and may be zero; the dtype and the
        other dimensions must agree.

        Raises, on all ranks: see `all_reduce`; ArgumentError also for values without
        dimensions and an axis out of range.
        """
        options = options or _DEFAULT

        def prepare() -> tuple[list[Any], nest.Spec, list[Any], list[int]]:
            leaves, spec, given = to_arrays(value)
            axes = check_each(
                given, spec, lambda a, name: gather_axis(axis, a.ndim, name)
            )
            return leaves, spec, given, axes

        with self.agreement.turns:
            leaves, spec, given, axes = self.agreement.prepare(operation, prepare)
            described = describe_but(given, axes)
            agreed = (_axes(axes), *_agreed(options))
            call = Call(operation, agreed, spec, described)
            self.agreement.require_same(call, timeout=options.timeout_seconds)
            results = gathering.gather(
                self._transport(options),
                self.size,
                given,
                axes,
                options.bytes_per_pack,
                _deadline(options),
                self._empty,
            )
        return nest.unflatten(spec, map(arrays.like, results, leaves))

    def broadcast(self, operation: str, value: Any, root: int = 0) -> Any:
        """Return, on every rank, the nest of arrays that rank `root` passed.

        Every rank passes a value of the same structure, shapes and dtypes.
        """
        with self.agreement.turns:
            leaves, spec, given = self.agreement.prepare(
                operation, lambda: to_arrays(value)
            )
            described = tuple((a.dtype, a.shape) for a in given)
            self.agreement.require_same(Call(operation, (), spec, described))
            results = [array.copy(order="C") for array in given]
            for result in results:
                if self.size > 1:
                    self.transport.broadcast(result, root, None)
        return nest.unflatten(spec, map(arrays.like, results, leaves))

    def sum_arrays(
        self,
        values: Sequence[Any],
        options: CommunicationOptions,
        transport: Transport | None = None,
    ) -> list[Any]:
        """Return the sums over all ranks of contiguous arrays, as arrays of our own."""
        if self.size == 1:
            return [value.copy() for value in values]
        deadline, way = _deadline(options), transport or self._transport(options)
        totals: list[Any] = [None] * len(values)
        sizes = [value.nbytes for value in values]
        for members in packing.groups(values, sizes, options.bytes_per_pack):
            sends = [values[j] for j in members]
            total = self._empty(sum(send.size for send in sends), sends[0])
            way.allreduce_packed(sends, total, deadline)
            shapes = [send.shape for send in sends]
            for j, part in zip(members, packing.unpack(total, shapes), strict=True):
                totals[j] = part
        return totals

    def _empty(self, size: int, like: Any) -> Any:
        """Return memory for a result, if it is large perhaps that of a former one."""
        is_large = size * like.dtype.itemsize >= _LARGE_BYTES
        if is_large and isinstance(like, np.ndarray):
            return self._buffers.empty((size,), like.dtype)
        return arrays.namespace(like).empty(size, like.dtype)


def _axes(axes: Sequence[Any]) -> tuple[str, Any]:
    """Return the axes as part of a call: one if all leaves have the same."""
    return "axis", axes[0] if len(set(axes)) == 1 else tuple(axes)


def _agreed(options: CommunicationOptions) -> tuple[tuple[str, Any], ...]:
    """Return the options, all of which the ranks must have in common."""
    return tuple((f"options.{name}", value) for name, value in vars(options).items())


def _deadline(options: CommunicationOptions) -> float | None:
    seconds = options.timeout_seconds
    return None if seconds is None else time.monotonic() + seconds
