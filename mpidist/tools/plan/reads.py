"""How much the ranks read in an epoch: counted if that is cheap, else estimated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.tools.plan.estimates import (
    Reads,
    count_lanes,
    estimate_in_order,
    estimate_shuffled,
)
from mpidist.tools.plan.shares import ORDER, Share

__all__ = ["count_reads"]

# What may be spent, in rows, of which three million take about a second
_BUDGET_ROWS = 10_000_000
_CALL_ROWS = 300
_LOOKUP_ROWS = 25  # to look for a row's chunk among those that are kept
_SAMPLED_RANKS = 4


def count_reads(shares: Sequence[Share]) -> dict[int, Reads]:
    """Return what ranks read: all of them, or some that are spread over all."""
    distinct = list(dict.fromkeys(shares))
    reads = _count(distinct)
    return {i: reads[share] for i, share in enumerate(shares) if share in reads}


def _count(shares: Sequence[Share]) -> dict[Share, Reads]:
    """Return what is read of shares, or of some of them, within the budget."""
    costs = {share: _cost(share) for share in shares}
    if sum(costs.values()) <= _BUDGET_ROWS:
        return {share: _go_through(share) for share in shares}
    if all(share.source.fixed_row_bytes is not None for share in shares):
        return {share: _multiply(share) for share in shares}
    if not all(share.is_in_order for share in shares):
        return {share: _count_shuffled(share) for share in shares}
    some = _spread([share for share in shares if share.rows])
    budget = _BUDGET_ROWS / len(some)
    return {share: _go_some_way(share, costs[share], budget) for share in some}


def _cost(share: Share) -> float:
    """Return what it takes to go through an epoch, in rows."""
    rows, asked = share.rows, _CALL_ROWS * share.steps / share.group
    if (mixed := share.pipeline.block_order(ORDER)) is not None:
        part = count_lanes(share, mixed) / mixed.lanes
        return asked + rows + len(share.source) * part
    if share.is_in_order:
        return asked + rows
    # A permutation computes the rows of other ranks as well
    if not share.source.columns_in_blocks:
        return asked + len(share.source)
    lookups = _LOOKUP_ROWS * len(share.source.layout.files[0].datasets)
    return asked + len(share.source) + rows * lookups


def _go_through(share: Share) -> Reads:
    """Return what is counted in a whole epoch."""
    share.begin()
    share.ask(range(share.steps if share.rows else 0))
    found = share.source
    return Reads(found.read_bytes, found.decoded_chunks, found.opened_files, True)


def _count_shuffled(share: Share) -> Reads:
    return estimate_shuffled(share) if share.rows else _go_through(share)


def _go_some_way(share: Share, cost: float, budget: float) -> Reads:
    """Return what is counted in an epoch, or estimated if it is too long."""
    if cost <= budget:
        return _go_through(share)
    return estimate_in_order(share, int(budget / cost * share.steps))


def _multiply(share: Share) -> Reads:
    """Return what rows take of which any takes the same."""
    rows = share.rows + share.reads_example
    return Reads(rows * (share.source.fixed_row_bytes or 0), 0, None, True)


def _spread(shares: Sequence[Share]) -> list[Share]:
    """Return some of the shares, the first and the last among them."""
    places = np.linspace(0, len(shares) - 1, min(_SAMPLED_RANKS, len(shares)))
    return [shares[i] for i in places.astype(int).tolist()]
