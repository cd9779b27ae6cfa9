"""Seeds of shuffles, and random orders of rows in chunks that are decoded whole.

Reading rows in an exact random order would decode a chunk for every row. Instead the
chunks are put in a random order, and the rows of several consecutive chunks, a shuffle
block, are mixed. Integers only, no communication; the order depends on the seed, the
epoch and how the rows are stored, never on batches or the number of replicas.

So that replicas need not all decode the same chunks, runs of rows come from several
stripes in turn: each is a section of the order of chunks, with shuffle blocks of its
own. If the batch size divides the rows of one turn, a replica's slices of all batches
consist of few stripes. (MosaicML's StreamingDataset has canonical nodes for this.)
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import secrets
from collections.abc import Callable, Iterator

import numpy as np

from mpidist.data.sharding import Indices, Permutation, mix_seed
from mpidist.hdf5.chunks import ChunkLayout

STRIPE_ROWS = 32  # that a stripe contributes in its turn
# Turns of 1,536 rows are multiples of the usual batch sizes
_STRIPES = (48, 24, 8, 4, 2, 1)
_LEAST_MIXED = 8  # chunks of a stripe


def draw_number() -> int:
    """Return a random number below 2**62."""
    return secrets.randbits(62)


_Source = tuple[Callable[[], int], bool]
_source: contextvars.ContextVar[_Source]
_source = contextvars.ContextVar("source", default=(draw_number, False))


@contextlib.contextmanager
def drawing(draw: Callable[[], int], is_common: bool) -> Iterator[None]:
    """Take the seeds that are drawn in the block from `draw`.

    Args:
      draw: returns numbers.
      is_common: whether it returns the same on all ranks.
    """
    token = _source.set((draw, is_common))
    try:
        yield
    finally:
        _source.reset(token)


class Seed:
    """The seed of a shuffle, shared by all datasets that are made from the shuffle.

    Attributes:
      number: the same on all ranks once a dataset with it is distributed.
      is_given: whether the user has chosen the number.
      is_common: whether the number is known to be the same on all ranks.
      is_used: whether rows have come in the order of the number.

    Args:
      number: None draws one.
      is_fixed: whether the order is the same in each epoch.
    """

    def __init__(self, number: int | None = None, is_fixed: bool = False):
        # Inside `interleave` all ranks draw the same
        draw, is_common = _source.get()
        self.is_given = number is not None
        self.is_common = self.is_given or is_common
        self.is_used = False
        self.is_fixed = is_fixed
        self.number = draw() if number is None else number

    def __str__(self) -> str:
        return str(self.number) if self.is_given else "None"


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
      block_chunks: number of chunks mixed at a time, over all stripes.
      seed: any integer.
      epoch: number of the epoch; each has another order.
    """

    def __init__(self, layout: ChunkLayout, block_chunks: int, seed: int, epoch: int):
        self._length = sum(layout.lengths)
        self._seed = seed
        self._epoch = epoch
        self._sequence = _ChunkSequence(layout, seed, epoch)
        stripes, self._block_chunks = divide_block(layout, block_chunks)
        self._turn = stripes * STRIPE_ROWS
        self._stripes = stripes
        self._layout = layout
        self._block_rows = self._block_chunks * layout.rows
        # While one shuffle block of a stripe ends, the next one may have begun
        self._mixed = functools.lru_cache(maxsize=2 * stripes)(self._mix)

    @property
    def stripes(self) -> int:
        """The number of stripes that contribute in turn."""
        return self._stripes

    @property
    def turn(self) -> int:
        """The number of rows after which the first stripe contributes again."""
        return self._turn

    @property
    def block_chunks(self) -> int:
        """The number of chunks in a shuffle block of one stripe."""
        return self._block_chunks

    @property
    def block_rows(self) -> int:
        """The number of rows in a shuffle block of one stripe."""
        return self._block_rows

    @property
    def layout(self) -> ChunkLayout:
        """How the rows are stored in chunks."""
        return self._layout

    def stripes_of(self, positions: Indices) -> set[int]:
        """Return the stripes of some positions."""
        return set((positions % self._turn // STRIPE_ROWS).tolist())

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
        # Each turn takes the next run of every stripe
        turns, inside = np.divmod(positions, self._turn)
        stripes, run = np.divmod(inside, STRIPE_ROWS)
        return stripes, self._stripe_start(stripes) + turns * STRIPE_ROWS + run

    def _stripe_start(self, stripes: Indices) -> Indices:
        whole, rest = divmod(self._length, self._turn)
        before = stripes * STRIPE_ROWS
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


def divide_block(layout: ChunkLayout, block_chunks: int) -> tuple[int, int]:
    """Return the number of stripes, and the chunks that each of them mixes.

    Args:
      layout: how the rows are stored in chunks.
      block_chunks: number of chunks mixed at a time, over all stripes.
    """
    # Stripes begin within chunks, which two replicas then decode: so there are many
    # chunks for each.
    most = min(block_chunks, layout.count // 2) // _LEAST_MIXED
    stripes = next(n for n in _STRIPES if n <= max(1, most))
    return stripes, max(1, block_chunks // stripes)
