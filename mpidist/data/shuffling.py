"""Random orders of rows that lie in chunks, of which each is decoded as a whole.

Reading rows in an exact random order would decode a chunk for every row. Instead the
chunks are put in a random order, and the rows of several chunks that follow each other
in it, a window, are mixed. Integers only, no communication; the order depends on the
seed, the epoch and the sizes below, never on the number of replicas.

So that replicas need not all decode the same chunks, the rows of a batch come from
several lanes: each is a part of the order of chunks, with windows of its own, and gives
a run of rows to each batch. A replica's slice of a batch is then made of few lanes, the
same in every batch. (MosaicML's StreamingDataset has canonical nodes for this.)
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from mpidist.data.sharding import Indices, Permutation, mix_seed

__all__ = ["LANE_ROWS", "BlockOrder", "Blocks"]

_WINDOW_BYTES = 256 << 20
_WINDOW_BLOCKS = 64
LANE_ROWS = range(16, 33)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How rows lie in chunks.

    Args:
      lengths: the rows of each run (file); a run starts a new block.
      rows: of a block, the last of a run may have fewer.
      row_bytes: of a row in memory.
      is_costly: whether reading a row costs as much as reading its block.
    """

    lengths: tuple[int, ...]
    rows: int
    row_bytes: int
    is_costly: bool

    @functools.cached_property
    def count(self) -> int:
        """How many blocks there are."""
        return sum(-(-length // self.rows) for length in self.lengths)

    @property
    def default_window(self) -> int:
        """How many blocks are mixed: 64, or fewer that have 256 MiB."""
        fitting = _WINDOW_BYTES // max(1, self.rows * self.row_bytes)
        return min(max(1, fitting), _WINDOW_BLOCKS)


class _Sequence:
    """The rows of all blocks in the random order of the blocks.

    It needs no table of the blocks: all but the last of each run are of one size, and
    of these last ones the places in the order are known.
    """

    def __init__(self, blocks: Blocks, seed: int, epoch: int):
        self._rows = blocks.rows
        lengths = np.array(blocks.lengths, np.int64)
        counts = -(-lengths // blocks.rows)
        self._first_rows = np.concatenate([[0], np.cumsum(lengths)])
        self._first_blocks = np.concatenate([[0], np.cumsum(counts)])
        self._blocks = int(self._first_blocks[-1])
        self._order = Permutation(self._blocks, seed, epoch)
        # The places of short blocks, and how many rows these and those before lack
        lacking = counts * blocks.rows - lengths
        short = np.flatnonzero(lacking)
        places = self._order.inverse(self._first_blocks[short + 1] - 1)
        by_place = np.argsort(places)
        self._short = places[by_place]
        self._lacking = np.concatenate([[0], np.cumsum(lacking[short][by_place])])
        self._short_ends = (self._short + 1) * self._rows - self._lacking[1:]

    def place(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return in which block of the order each position is, and where in it."""
        ended = np.searchsorted(self._short_ends, positions, "right")
        return np.divmod(positions + self._lacking[ended], self._rows)

    def start(self, places: Indices) -> Indices:
        """Return the position of the first row of each block of the order."""
        places = np.clip(places, 0, self._blocks)
        before = np.searchsorted(self._short, places, "left")
        starts: Indices = places * self._rows - self._lacking[before]
        return starts

    def rows(self, positions: Indices) -> Indices:
        """Return the row at each position."""
        places, inside = self.place(positions)
        blocks = self._order(places)
        runs = np.searchsorted(self._first_blocks, blocks, "right") - 1
        starts = self._first_rows[runs] - self._first_blocks[runs] * self._rows
        rows: Indices = starts + blocks * self._rows + inside
        return rows


class BlockOrder:
    """A random order of rows in blocks.

    Args:
      blocks: how the rows lie.
      seed: which order, any integer.
      epoch: which of the orders of that seed, any integer >= 0.
      window: how many blocks are mixed at a time, at least one for each lane.
      batch_size: the rows of a batch; None for rows that are not batched.
    """

    def __init__(
        self, blocks: Blocks, seed: int, epoch: int, window: int, batch_size: int | None
    ):
        self._length = sum(blocks.lengths)
        self._seed = seed
        self._epoch = epoch
        self._sequence = _Sequence(blocks, seed, epoch)
        self._batch = min(batch_size or self._length, max(1, self._length))
        self._lane_rows = _lane_rows(self._batch) if batch_size else self._batch
        lanes = -(-self._batch // self._lane_rows)
        self._lanes = lanes
        self._blocks = blocks
        self._window = max(1, window // lanes)
        self._window_rows = self._window * blocks.rows
        self._mixed = functools.lru_cache(maxsize=2 * lanes)(self._mix)

    @property
    def lanes(self) -> int:
        """From how many lanes the rows of a batch come."""
        return self._lanes

    @property
    def lane_rows(self) -> int:
        """How many rows of a batch come from one of them; perhaps fewer of the last."""
        return self._lane_rows

    @property
    def window(self) -> int:
        """How many blocks are mixed at a time, in each lane."""
        return self._window

    @property
    def blocks(self) -> Blocks:
        """How the rows lie."""
        return self._blocks

    def lanes_of(self, positions: Indices) -> Indices:
        """Return from which lanes some positions come."""
        lanes: Indices = np.unique(positions % self._batch // self._lane_rows)
        return lanes

    def blocks_of(self, lanes: Indices) -> tuple[Indices, Indices]:
        """Return the places of the first and the last block of each lane `(lanes,)`.

        They are in the order of the blocks. A lane without rows has none: its last
        place is before its first.
        """
        starts, ends = self._lane_start(lanes), self._lane_start(lanes + 1)
        first, _ = self._sequence.place(starts)
        last, _ = self._sequence.place(ends - 1)
        return first, np.where(starts < ends, last, first - 1)

    def rows_in_use(self, positions: Indices) -> int:
        """Return how many rows are in the windows from which some positions come."""
        return self.lanes_of(positions).size * self._window_rows

    def __call__(self, positions: Indices) -> Indices:
        """Return the row at each of `positions` `(positions,)`."""
        lanes, in_sequence = self._in_lanes(positions)
        places, _ = self._sequence.place(in_sequence)
        # Windows of the lanes end at different steps, not all at once
        windows = (places + lanes * self._window // self._lanes) // self._window
        kinds = windows * self._lanes + lanes
        for kind in np.unique(kinds).tolist():
            window, lane = divmod(kind, self._lanes)
            here = np.flatnonzero(kinds == kind)
            start, order = self._mixed(lane, window)
            in_sequence[here] = start + order[in_sequence[here] - start]
        return self._sequence.rows(in_sequence)

    def _in_lanes(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the lane of each position, and where it is before mixing."""
        batches, inside = np.divmod(positions, self._batch)
        lanes, run = np.divmod(inside, self._lane_rows)
        in_batch = lanes * self._lane_rows
        width = np.minimum(self._lane_rows, self._batch - in_batch)
        return lanes, self._lane_start(lanes) + batches * width + run

    def _lane_start(self, lanes: Indices) -> Indices:
        whole, rest = divmod(self._length, self._batch)
        before = np.minimum(lanes * self._lane_rows, self._batch)
        starts: Indices = whole * before + np.minimum(rest, before)
        return starts

    def _mix(self, lane: int, window: int) -> tuple[int, Indices]:
        """Return where the rows of a window begin before mixing, and their order."""
        first = window * self._window - lane * self._window // self._lanes
        edges = self._sequence.start(np.array([first, first + self._window]))
        lane_edges = self._lane_start(np.array([lane, lane + 1]))
        start, stop = np.clip(edges, *lane_edges).tolist()
        order = Permutation(
            stop - start, mix_seed(self._seed, lane, window), self._epoch
        )
        return start, order(np.arange(stop - start))


def _lane_rows(batch_size: int) -> int:
    """Return how many rows of a batch come from the same lane.

    A divisor of the batch size near 32 if there is one, so that the slices of as many
    replicas as possible consist of whole lanes.
    """
    divisors = [rows for rows in LANE_ROWS if batch_size % rows == 0]
    return max(divisors, default=min(batch_size, LANE_ROWS[-1]))
