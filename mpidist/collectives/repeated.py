"""All-reduces of one array that were made before: they need to be checked no more.

Only what differs from call to call is looked at. Small calls take half the time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mpidist import arithmetic
from mpidist.agreement.agree import Agreement
from mpidist.agreement.calls import Call, digest
from mpidist.collectives.results import Results
from mpidist.memory.symmetric import SymmetricMemory
from mpidist.options import ReduceOp
from mpidist.transports import Routes

__all__ = ["RepeatedReductions"]

_MOST = 1000  # calls that are remembered
_NAMES = (str, ReduceOp)  # these can be looked up; what else there may be is an error


class _Known(NamedTuple):
    """A call that was checked before.

    Args:
      call: what the ranks compare.
      number: its digest.
      fits: whether the ranks exchange the arrays while they compare.
      is_mean: whether the mean is wanted.
    """

    call: Call
    number: int
    fits: bool
    is_mean: bool


class RepeatedReductions:
    """What a strategy remembers of its all-reduces with default options."""

    def __init__(
        self,
        agreement: Agreement,
        routes: Routes,
        symmetric: SymmetricMemory,
        results: Results,
    ):
        self._agreement = agreement
        self._routes = routes
        self._symmetric = symmetric
        self._results = results
        self._known: dict[Any, _Known] = {}

    def find(self, operation: str, reduce_op: Any, value: Any) -> _Known | None:
        """Return a call like one that was made before, with whatever is passed."""
        if type(value) is not np.ndarray or type(reduce_op) not in _NAMES:
            return None
        return self._known.get((operation, reduce_op, value.dtype, value.shape))

    def remember(self, call: Call, reduce_op: Any, value: Any, fits: bool) -> None:
        """Note a call that succeeded, if all that it needs is to be known by `find`.

        That is so where an array is added up in its own dtype, as is the result.
        """
        if type(value) is not np.ndarray or type(reduce_op) not in _NAMES:
            return
        if self._agreement.size == 1 or not value.ndim or not value.dtype.isnative:
            return
        op = ReduceOp.parse(reduce_op)
        out, partial = arithmetic.to_add(op, [value[:0]])
        is_simple = out == [value.dtype] and partial[0].dtype == value.dtype
        if is_simple and len(self._known) < _MOST:
            key = call.operation, reduce_op, value.dtype, value.shape
            self._known[key] = _Known(call, digest(call), fits, op is ReduceOp.MEAN)

    def reduce(self, known: _Known, value: Any) -> Any:
        """Return the reduction of a host array for a call that `find` found."""
        agreement = self._agreement
        with agreement.turns:
            if known.fits:
                parts = agreement.exchange(known.call, known.number, value)
                total = arithmetic.add_in_order(parts)
            else:
                total = self._reduce_large(known, value)
        if known.is_mean:
            total /= agreement.size
        return total

    def _reduce_large(self, known: _Known, value: Any) -> Any:
        place = self._symmetric.place_of([value])
        is_symmetric = self._agreement.compare(known.call, known.number, place)
        everyone = self._symmetric.everyone(value) if is_symmetric else None
        total = self._results.empty(value.size, value).reshape(value.shape)
        in_node = self._routes.in_node
        if everyone is not None and in_node is not None:
            in_node.allreduce_symmetric([everyone], [total], None)
        else:
            send = arithmetic.contiguous(value, value.dtype)
            self._routes.default.allreduce_sum(send, total, None)
        return total
