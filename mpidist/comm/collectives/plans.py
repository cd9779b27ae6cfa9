"""All-reduces that were made before: they need to be checked no more.

Only what differs from call to call is looked at. Small calls take half the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic
from mpidist.comm.consensus.agreement import Agreement
from mpidist.comm.consensus.calls import Call, digest
from mpidist.device import arrays
from mpidist.device.copies import SmallCopies
from mpidist.options import ReduceOp
from mpidist.util import nest

__all__ = ["Known", "RepeatedReductions"]

_MOST = 1000  # calls that are remembered
_NUMBERS = {float, complex, np.float32, np.float64, np.complex64, np.complex128}
_NAMES = (str, ReduceOp)  # these can be looked up; what else there may be is an error


class Known(NamedTuple):
    """A call that was checked before.

    Args:
      call: what the ranks compare.
      number: its digest.
      fits: whether the ranks exchange the arrays while they compare.
      op: the operation.
      is_integer_sum: whether it may overflow.
    """

    call: Call
    number: int
    fits: bool
    op: ReduceOp
    is_integer_sum: bool


class KnownNest(NamedTuple):
    """A call with a nest of arrays and numbers that was checked before.

    Args:
      call, number, fits, op: see `Known`.
    """

    call: Call
    number: int
    fits: bool
    op: ReduceOp


class RepeatedReductions:
    """What a strategy remembers of its all-reduces with default options."""

    def __init__(self, agreement: Agreement, copies: SmallCopies):
        self._agreement = agreement
        self._copies = copies
        self._known: dict[Any, Known] = {}
        self._known_nests: dict[Any, KnownNest] = {}

    def find(self, operation: str, reduce_op: Any, value: Any) -> Known | None:
        """Return a call like one that was made before, with whatever is passed."""
        if not _is_array(value) or type(reduce_op) not in _NAMES:
            return None
        kind = type(value), value.dtype, value.shape
        return self._known.get((operation, reduce_op, *kind))

    def remember(self, call: Call, reduce_op: Any, value: Any, fits: bool) -> None:
        """Note a call that succeeded, if all that it needs is to be known by `find`.

        That is so where an array is added up in its own dtype, as is the result.
        """
        if not _is_array(value) or type(reduce_op) not in _NAMES:
            return
        if self._agreement.size == 1 or not value.ndim or not value.dtype.isnative:
            return
        op = ReduceOp.parse(reduce_op)
        out, partial = arithmetic.to_add(op, [value[:0]])
        is_simple = out == [value.dtype] and partial[0].dtype == value.dtype
        if is_simple and len(self._known) < _MOST:
            key = call.operation, reduce_op, type(value), value.dtype, value.shape
            may_overflow = arithmetic.is_integer_sum(op, out)
            self._known[key] = Known(call, digest(call), fits, op, may_overflow)

    def find_nest(
        self, operation: str, reduce_op: Any, value: Any
    ) -> tuple[KnownNest, list[Any], nest.Spec] | None:
        """Return a call like one before, the leaves of `value`, and its structure."""
        if not self._known_nests or type(reduce_op) not in _NAMES:
            return None
        leaves, spec = nest.flatten(value)
        key = operation, reduce_op, spec, tuple(map(_kind_of, leaves))
        known = self._known_nests.get(key)
        return None if known is None else (known, leaves, spec)

    def remember_nest(
        self, call: Call, reduce_op: Any, leaves: Sequence[Any], fits: bool
    ) -> None:
        """Note a call that succeeded, if `find_nest` knows kinds of all its leaves."""
        kinds = tuple(map(_kind_of, leaves))
        if None in kinds or self._agreement.size == 1 or call.spec is None:
            return
        if type(reduce_op) in _NAMES and len(self._known_nests) < _MOST:
            key = call.operation, reduce_op, call.spec, kinds
            op = ReduceOp.parse(reduce_op)
            self._known_nests[key] = KnownNest(call, digest(call), fits, op)

    def reduce_small(self, known: Known, value: Any) -> Any:
        """Return the reduction of an array for a call that `fits`. Collective."""
        is_on_gpu = not isinstance(value, np.ndarray)
        with self._agreement.turns:
            send = self._copies.down([value])[0] if is_on_gpu else value
            parts = self._agreement.exchange(known.call, known.number, send)
            total = arithmetic.add_in_order(parts)
            if known.is_integer_sum:
                with self._agreement.same_on_all():
                    arithmetic.check_sum((total, parts), "value")
            if known.op is ReduceOp.MEAN:
                total /= self._agreement.size
            return self._copies.up([total], [value])[0] if is_on_gpu else total


def _kind_of(leaf: Any) -> Any:
    """Return what a leaf has in common with those like it; None for unusual ones."""
    kind = type(leaf)
    if kind is np.ndarray:
        return (leaf.dtype, leaf.shape) if leaf.dtype.isnative else None
    return kind if kind in _NUMBERS else None


def _is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, and no subclass, or of CuPy."""
    return type(value) is np.ndarray or arrays.is_device_array(value)
