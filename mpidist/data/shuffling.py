"""Random orders of rows in chunks that can only be decoded whole.

Reading rows in an exact random order would decode a chunk for every row. Instead the
chunks are put in a random order, and the rows of several consecutive chunks, a shuffle
block, are mixed. Integers only, no communication; the order depends on the seed, the
epoch and the sizes below, never on the number of replicas.

So that replicas need not all decode the same chunks, the rows of a batch come from
several stripes: each is a section of the order of chunks, with shuffle blocks of its
own, and contributes a run of rows to each batch. A replica's slice of a batch then
consists of few stripes, the same in every batch. (MosaicML's StreamingDataset has
canonical nodes for this.)
"""

from __future__ import annotations

import functools

import numpy as np

from mpidist.data.sharding import Indices, Permutation, mix_seed
from mpidist.hdf5.chunks import ChunkLayout

STRIPE_ROWS = range(16, 33)


class _ChunkSequence:
    """The rows of all chunks, with the chunks in a random order.

    It needs no table of the chunks: all have the same size, except for the last chunk
    of each run, whose slots in the order are computed once.
    """

    def __init__(self, layout: ChunkLayout, seed: int, epoch: int):
        self._rows = layout.rows
        lengths = np.array(layout.lengths, np.int64)
        counts = -(-lengths // layout.rows)
        self._first_rows = np.concatenate([[0], np.cumsum(lengths)])
        self._first_chunks = np.concatenate([[0], np.cumsum(counts)])
        self._chunks = int(self._first_chunks[-1])
        self._order = Permutation(self._chunks, seed, epoch)
        # Find the slots of short chunks, and the rows missing up to each of them
        lacking = counts * layout.rows - lengths
        short = np.flatnonzero(lacking)
        slots = self._order.inverse(self._first_chunks[short + 1] - 1)
        by_slot = np.argsort(slots)
        self._short = slots[by_slot]
        self._lacking = np.concatenate([[0], np.cumsum(lacking[short][by_slot])])
        self._short_ends = (self._short + 1) * self._rows - self._lacking[1:]

    def locate(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the slot of each position's chunk, and the offset in the chunk."""
        # Pad the short chunks before a position, so that all chunks have equal sizes
        ended = np.searchsorted(self._short_ends, positions, "right")
        return np.divmod(positions + self._lacking[ended], self._rows)

    def start(self, slots: Indices) -> Indices:
        """Return the position of the first row of the chunk in each slot."""
        slots = np.clip(slots, 0, self._chunks)
        before = np.searchsorted(self._short, slots, "left")
        starts: Indices = slots * self._rows - self._lacking[before]
        return starts

    def rows(self, positions: Indices) -> Indices:
        """Return the row at each position."""
        slots, inside = self.locate(positions)
        chunks = self._order(slots)
        runs = np.searchsorted(self._first_chunks, chunks, "right") - 1
        starts = self._first_rows[runs] - self._first_chunks[runs] * self._rows
        rows: Indices = starts + chunks * self._rows + inside
        return rows


class ChunkShuffle:
    """A random order of rows that reads few chunks at a time.

    Args:
      layout: how the rows are stored in chunks.
      seed: any integer.
      epoch: number of the epoch; each has another order.
      block_chunks: number of chunks mixed at a time, over all stripes; each stripe
        mixes at least one.
      batch_size: rows of a batch; None for rows that are not batched.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        seed: int,
        epoch: int,
        block_chunks: int,
        batch_size: int | None,
    ):
        self._length = sum(layout.lengths)
        self._seed = seed
        self._epoch = epoch
        self._sequence = _ChunkSequence(layout, seed, epoch)
        self._batch = min(batch_size or self._length, max(1, self._length))
        self._stripe_rows = _stripe_rows(self._batch) if batch_size else self._batch
        stripes = -(-self._batch // self._stripe_rows)
        self._stripes = stripes
        self._layout = layout
        self._block_chunks = max(1, block_chunks // stripes)
        self._block_rows = self._block_chunks * layout.rows
        # While one shuffle block of a stripe ends, the next one may have begun
        self._mixed = functools.lru_cache(maxsize=2 * stripes)(self._mix)

    @property
    def stripes(self) -> int:
        """The number of stripes that contribute to each batch."""
        return self._stripes

    @property
    def stripe_rows(self) -> int:
        """The rows that a stripe contributes to a batch; the last may have fewer."""
        return self._stripe_rows

    @property
    def block_chunks(self) -> int:
        """The number of chunks in a shuffle block of one stripe."""
        return self._block_chunks

    @property
    def layout(self) -> ChunkLayout:
        """How the rows are stored in chunks."""
        return self._layout

    def stripes_of(self, positions: Indices) -> Indices:
        """Return the distinct stripes of some positions."""
        stripes: Indices = np.unique(positions % self._batch // self._stripe_rows)
        return stripes

    def rows_in_use(self, positions: Indices) -> int:
        """Return how many rows the shuffle blocks of some positions have."""
        return self.stripes_of(positions).size * self._block_rows

    def __call__(self, positions: Indices) -> Indices:
        """Return the row at each of `positions` `(positions,)`."""
        stripes, in_sequence = self._in_stripes(positions)
        slots, _ = self._sequence.locate(in_sequence)
        # Stagger the shuffle blocks of the stripes, or all stripes would start to
        # decode new chunks at the same step
        stagger = stripes * self._block_chunks // self._stripes
        blocks = (slots + stagger) // self._block_chunks
        # Permute the rows within each shuffle block
        keys = blocks * self._stripes + stripes
        for key in np.unique(keys).tolist():
            block, stripe = divmod(key, self._stripes)
            here = np.flatnonzero(keys == key)
            start, order = self._mixed(stripe, block)
            in_sequence[here] = start + order[in_sequence[here] - start]
        return self._sequence.rows(in_sequence)

    def _in_stripes(self, positions: Indices) -> tuple[Indices, Indices]:
        """Return the stripe of each position, and its position before mixing."""
        batches, inside = np.divmod(positions, self._batch)
        stripes, run = np.divmod(inside, self._stripe_rows)
        in_batch = stripes * self._stripe_rows
        width = np.minimum(self._stripe_rows, self._batch - in_batch)
        return stripes, self._stripe_start(stripes) + batches * width + run

    def _stripe_start(self, stripes: Indices) -> Indices:
        whole, rest = divmod(self._length, self._batch)
        before = np.minimum(stripes * self._stripe_rows, self._batch)
        starts: Indices = whole * before + np.minimum(rest, before)
        return starts

    def _mix(self, stripe: int, block: int) -> tuple[int, Indices]:
        """Return the first position of a shuffle block, and the order of its rows."""
        stagger = stripe * self._block_chunks // self._stripes
        first = block * self._block_chunks - stagger
        edges = self._sequence.start(np.array([first, first + self._block_chunks]))
        stripe_edges = self._stripe_start(np.array([stripe, stripe + 1]))
        start, stop = np.clip(edges, *stripe_edges).tolist()
        order = Permutation(
            stop - start, mix_seed(self._seed, stripe, block), self._epoch
        )
        return start, order(np.arange(stop - start))


def _stripe_rows(batch_size: int) -> int:
    """Return how many rows of a batch come from the same stripe.

    A divisor of the batch size near 32 if there is one, so that the slices of as many
    replicas as possible consist of whole stripes.
    """
    divisors = [rows for rows in STRIPE_ROWS if batch_size % rows == 0]
    return max(divisors, default=min(batch_size, STRIPE_ROWS[-1]))
