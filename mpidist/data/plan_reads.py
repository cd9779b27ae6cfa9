"""How much the ranks read in an epoch: counted if that is cheap, else estimated."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpidist.block_order import BlockOrder
from mpidist.data.dry_rows import DryRows, stored_bytes
from mpidist.data.hdf5_parts import KEPT_BYTES
from mpidist.data.shares import ORDER, Share
from mpidist.sharding import Indices

__all__ = ["Reads", "count_reads", "kept_bytes"]

# What may be spent, in rows, of which three million take about a second
_BUDGET_ROWS = 10_000_000
_CALL_ROWS = 300
_LOOKUP_ROWS = 25  # to look for a row's chunk among those that are kept
_SAMPLED_RANKS = 4
# So many chunks must pass in a sample of steps that reads them in order
_SAMPLED_CHUNKS = 8


class Reads(NamedTuple):
    """What one rank reads in an epoch.

    Args:
      read_bytes: from files, in rows or chunks as they are stored; of what h5py reads,
        as many as it has in memory.
      decoded_chunks: how many rows of chunks are read whole; again if they were not
        kept.
      files: from how many files; None if these were not counted.
      is_exact: whether the bytes and chunks are no estimates.
    """

    read_bytes: float
    decoded_chunks: float
    files: int | None
    is_exact: bool


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
    if all(share.pipeline.block_order(ORDER) is not None for share in shares):
        return {share: _by_lanes(share) for share in shares}
    some = _spread([share for share in shares if share.rows])
    budget = _BUDGET_ROWS / len(some)
    return {
        share: _go_through(share) if cost <= budget else _estimate(share, budget)
        for share, cost in ((share, costs[share]) for share in some)
    }


def kept_bytes(share: Share) -> int:
    """Return how many bytes of decoded chunks a rank keeps in memory, at most."""
    limit = KEPT_BYTES
    if (mixed := share.pipeline.block_order(ORDER)) is not None:
        rows = mixed.rows_in_use(_lane_starts(share, 0, mixed))
        limit = share.source.layout.bytes_to_keep(rows)
    return min(limit, share.source.memory_bytes_in_blocks)


def _cost(share: Share) -> float:
    """Return what it takes to go through an epoch, in rows."""
    rows, asked = share.rows, _CALL_ROWS * share.steps / share.group
    if (mixed := share.pipeline.block_order(ORDER)) is not None:
        lanes = _lane_starts(share, 0, mixed).size
        return asked + rows + len(share.source) * lanes / mixed.lanes
    if share.is_in_order or not share.source.columns_in_blocks:
        return asked + rows
    return asked + rows * _LOOKUP_ROWS * len(share.source.layout.files[0].columns)


def _go_through(share: Share) -> Reads:
    """Return what is counted in a whole epoch."""
    share.begin()
    share.ask(range(share.steps))
    found = share.source
    return Reads(found.read_bytes, found.decoded_chunks, found.opened_files, True)


def _multiply(share: Share) -> Reads:
    """Return what rows take of which any takes the same."""
    rows = share.rows + share.reads_example
    return Reads(rows * (share.source.fixed_row_bytes or 0), 0, None, True)


def _by_lanes(share: Share) -> Reads:
    """Return about what a rank reads that decodes the blocks of its lanes."""
    mixed = share.pipeline.block_order(ORDER)
    assert mixed is not None
    means = _means(share.source, mixed.blocks.rows)
    blocks = _count_blocks(share, mixed)
    read_bytes = share.rows * means.row_bytes + blocks * means.block_bytes
    return Reads(read_bytes, blocks * means.chunks, None, False)


def _estimate(share: Share, budget: float) -> Reads:
    """Return about what a rank reads whose epoch is too long to go through."""
    step_cost = _cost(share) / share.steps
    groups = max(1, int(budget / step_cost / share.group / 2))
    half = min(groups * share.group, share.steps // 2)
    longest = max((c.chunk[0] for c in share.source.columns_in_blocks), default=1)
    rows = half * share.pipeline.batch_size
    if share.is_in_order and (share.replicas == 1 or rows < _SAMPLED_CHUNKS * longest):
        return _whole(share)
    if half == 0 or 2 * half * step_cost > _BUDGET_ROWS:
        return _whole(share, share.steps)  # so long a step has rows of all chunks
    return _sample(share, half)


def _sample(share: Share, half: int) -> Reads:
    """Return what an epoch takes if it goes on like the second half of a sample.

    In the first half the chunks are read that are kept from then on.
    """
    source = share.source
    share.begin()
    share.ask(range(half))
    first_bytes, first_chunks = source.read_bytes, source.decoded_chunks
    share.ask(range(half, 2 * half))
    more = share.steps / half - 1
    return Reads(
        first_bytes + more * (source.read_bytes - first_bytes),
        first_chunks + more * (source.decoded_chunks - first_chunks),
        None,
        False,
    )


def _whole(share: Share, times: int = 1) -> Reads:
    """Return about what a rank reads that decodes all chunks so many times."""
    means = _means(share.source, 1)
    chunks = sum(column.grid[0] for column in share.source.columns_in_blocks)
    stored = sum(stored_bytes(column) for column in share.source.columns_in_blocks)
    read_bytes = share.rows * means.row_bytes + times * stored
    return Reads(read_bytes, times * chunks, None, False)


class _Means(NamedTuple):
    """What is read in the mean.

    Args:
      row_bytes: for a row, of datasets that are not in chunks or need not be decoded.
      chunks: for a block, the chunks of the others.
      block_bytes: of these chunks.
    """

    row_bytes: float
    chunks: float
    block_bytes: float


@functools.lru_cache(maxsize=2)
def _means(source: DryRows, block_rows: int) -> _Means:
    """Return the means over all files, for blocks of so many rows."""
    row_bytes = chunks = block_bytes = 0.0
    for file in source.layout.files:
        part = file.rows / max(1, len(source))
        for column in file.columns if file.rows else ():
            stored = stored_bytes(column)
            if column.is_in_blocks:
                count = part * max(1, block_rows / column.chunk[0])
                chunks += count
                block_bytes += count * stored / column.grid[0]
            else:
                row_bytes += part * stored / file.rows
    return _Means(row_bytes, chunks, block_bytes)


def _count_blocks(share: Share, mixed: BlockOrder) -> int:
    """Return how many blocks a rank decodes: those of its lanes.

    A block that two lanes have is decoded for each, unless all are kept.
    """
    lanes = mixed.lanes_of(_lane_starts(share, 0, mixed))
    first, last = mixed.blocks_of(lanes)
    new = np.maximum(first, np.concatenate([[-1], last[:-1]]) + 1)
    blocks = int(np.maximum(last - new + 1, 0).sum())
    whole, kept = share.source.memory_bytes_in_blocks, kept_bytes(share)
    if blocks / max(1, mixed.blocks.count) * whole > kept:
        blocks = int((last - first + 1).sum())
    # The last batch may have fewer rows, and so other lanes
    at_end = mixed.lanes_of(_lane_starts(share, share.steps - 1, mixed))
    others = np.setdiff1d(at_end, lanes).size
    blocks += min(others * mixed.window, len(share.positions(share.steps - 1)))
    return min(blocks, mixed.blocks.count) if whole <= kept else blocks


def _lane_starts(share: Share, step: int, mixed: BlockOrder) -> Indices:
    """Return one place in a batch for each lane from which a rank gets rows."""
    mine = share.positions(step)
    start = mine.start - step * share.pipeline.batch_size
    lane_start = start - start % mixed.lane_rows
    return np.arange(lane_start, start + len(mine), mixed.lane_rows)


def _spread(shares: Sequence[Share]) -> list[Share]:
    """Return some of the shares, the first and the last among them."""
    places = np.linspace(0, len(shares) - 1, min(_SAMPLED_RANKS, len(shares)))
    return [shares[i] for i in places.astype(int).tolist()]
