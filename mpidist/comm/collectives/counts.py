"""Exchange of counts, together with the arrays if all are small.

Ranks may contribute different lengths, so their counts are sent with the comparison of
the calls, together with arrays that fit in the same message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm.collectives.arguments import deadline_of
from mpidist.comm.collectives.plans import CollectiveContext
from mpidist.comm.consensus.comparison import ALIGNMENT_BYTES, Pages, PayloadComparison
from mpidist.comm.consensus.consensus import Call
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.util.available_memory import round_up


class CountPlan(NamedTuple):
    """One kind of exchange.

    Args:
      call: what the ranks agree on.
      pages: the counts and bytes of all ranks, see `Payload`; None if the
        counts are sent separately.
      most_bytes: bytes of arrays that each rank can send along; -1 for none.
      options: see `CommunicationOptions`.
    """

    call: Call
    pages: Pages | None
    most_bytes: int
    options: CommunicationOptions


class Reader:
    """Reads the arrays of one rank in the order of writing."""

    def __init__(self, page: Any):
        self._page = page
        self._offset = 0

    def next(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return the next array: a view, valid until the next exchange."""
        array = np.ndarray(shape, dtype, self._page, self._offset)
        self._offset += round_up(array.nbytes, ALIGNMENT_BYTES)
        return array


def plan_counts(
    state: CollectiveContext,
    call: Call,
    counts: int,
    options: CommunicationOptions,
    sends_inline: bool,
) -> CountPlan:
    """Return a plan. Not collective.

    Args:
      state: of the strategy.
      call: what the ranks agree on.
      counts: the number of counts of each rank.
      options: see `CommunicationOptions`.
      sends_inline: whether arrays may be sent along: they are on the host.
    """
    pages, most_bytes, comparison = None, -1, state.consensus.comparison
    if state.consensus.size > 1 and isinstance(comparison, PayloadComparison):
        kinds: list[tuple[Any, tuple[int]]]
        # One more number than counts: the bytes of this rank's arrays.
        kinds = [(np.dtype(np.int64), (counts + 1,))]
        rest = comparison.payload_bytes - round_up(8 * (counts + 1), ALIGNMENT_BYTES)
        if sends_inline and rest > 0:
            most_bytes = rest
            kinds.append((np.dtype(np.uint8), (rest,)))
        if rest >= 0:
            pages = comparison.pages(kinds)
    return CountPlan(call, pages, most_bytes, options)


def exchange_counts(
    state: CollectiveContext,
    plan: CountPlan,
    counts: Sequence[int],
    inputs: Sequence[Any] = (),
) -> tuple[list[list[int]], Sequence[Any] | None]:
    """Return the counts of every rank, and its arrays if all are small. Collective.

    The call of `plan` is open, as what is returned is valid until the next one.
    Returns None instead of the ranks' pages, for `Reader`, if arrays were not sent
    along.

    Args:
      state: of the strategy.
      plan: of the call.
      counts: of this rank.
      inputs: its arrays, of any layout.

    Raises, on all ranks: see `Consensus.require_same`.
    """
    if plan.pages is None:
        plan.call.agree()
        return _gather(state, counts, plan.options), None
    # Known before the exchange, but other ranks' sizes are not: they are in the
    # page.
    size = sum([round_up(array.nbytes, ALIGNMENT_BYTES) for array in inputs])

    def fill(pages: Sequence[Any]) -> bool:
        pages[0][:] = (*counts, size)
        # Too large to send along: only the size is published, so that all ranks see
        # it.
        if size <= plan.most_bytes:
            written = Reader(pages[1])
            for array in inputs:
                written.next(array.shape, array.dtype)[...] = array
        return False

    parts = plan.call.exchange(plan.pages, fill)
    everyone = [part.tolist() for part in parts[0]]
    # The largest size decides for all, so that every rank takes the same branch
    # next.
    is_small = max([counts.pop() for counts in everyone]) <= plan.most_bytes
    return everyone, parts[1] if is_small else None


def _gather(
    state: CollectiveContext, counts: Sequence[int], options: CommunicationOptions
) -> list[list[int]]:
    """Return the counts of all ranks, by MPI. Collective."""
    ranks, own = state.consensus.size, np.array(counts, np.int64)
    if ranks == 1:
        return [own.tolist()]
    everyone = np.empty((ranks, own.size), np.int64)
    transport = state.transports.pick(CommunicationImplementation.MPI, False, False)
    # MPI's own call, not the tuning table, which could choose differently for small
    # sizes.
    transport.allgatherv(own, everyone, [own.size] * ranks, deadline_of(options))
    counts_by_rank: list[list[int]] = everyone.tolist()
    return counts_by_rank
