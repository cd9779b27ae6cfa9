"""Reads of each rank in an epoch: its share of the rows, bytes and decoded chunks.

A job's own datasets run over `DryRows`, which read nothing, so that no formula is
repeated here. If an epoch is too long, only a sample of the ranks is counted, or none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mpidist.data.batching import Batch
from mpidist.data.dataset import Dataset
from mpidist.data.distributed import reader
from mpidist.data.distributed.reader import divide, is_global
from mpidist.data.hdf5 import rows as hdf5_rows
from mpidist.data.hdf5.dataset_reader import BlockCache, block_rows
from mpidist.data.hdf5.index import DatasetIndex, FileIndex, ReadMethod
from mpidist.data.hdf5.rows import FileMap, Hdf5Rows
from mpidist.data.map_dataset import Epoch
from mpidist.data.sharding import WHOLE, BatchShare, Indices
from mpidist.data.shuffling import ChunkLayout, ChunkShuffle
from mpidist.options import AutoShardPolicy

__all__ = [
    "FIRST_EPOCH",
    "DryRows",
    "Reads",
    "Share",
    "count_reads",
    "kept_bytes",
    "shares_of",
    "stored_bytes",
]

Rows = npt.NDArray[np.int64]
FIRST_EPOCH = Epoch()  # the first epoch, which has as many rows as any
# Limit of the cost, in rows: three million take about a second
_BUDGET_ROWS = 10_000_000
_CALL_ROWS = 300
_LOOKUP_ROWS = 25  # cost of a cache lookup for a row's chunk
_SAMPLED_RANKS = 4


class _Block(NamedTuple):
    """Stands for a decoded chunk in the cache, which only uses its size."""

    nbytes: int


class DryRows:
    """A row source of row numbers, which counts the reads of a job with these rows.

    A dataset over it yields the numbers of the rows that the job reads, and uses the
    same cache of chunks.

    Args:
      rows: of the job.
      files: the indexes of its files, by path; None reads them from the files.
    """

    def __init__(self, rows: Hdf5Rows, files: Mapping[Path, FileIndex] | None = None):
        self._rows = rows
        if files is not None:
            rows.adopt([files[path] for path in rows.paths])
        self._file_map = rows.file_map()
        self._files = files or {file.path: file for file in self._file_map.files}
        self.restart()

    def restart(self) -> None:
        """Reset the counts and the cache."""
        self._cache = BlockCache(1, hdf5_rows.KEPT_BYTES)
        self._opened: set[int] = set()
        self.read_bytes = 0
        self.decoded_chunks = 0

    @property
    def opened_files(self) -> int:
        """The number of files that rows were requested from."""
        return len(self._opened)

    @property
    def file_map(self) -> FileMap:
        """The map of the files."""
        return self._file_map

    @functools.cached_property
    def chunked_datasets(self) -> list[DatasetIndex]:
        """The datasets of all files whose chunks are read whole."""
        indexes = (index for file in self._file_map.files for index in file.datasets)
        return [index for index in indexes if index.is_in_blocks]

    @functools.cached_property
    def filled_files(self) -> int:
        """The number of files with rows."""
        return sum(file.rows > 0 for file in self._file_map.files)

    @functools.cached_property
    def chunked_bytes(self) -> int:
        """The bytes of `chunked_datasets` in memory."""
        return sum(c.row_bytes * c.shape[0] for c in self.chunked_datasets)

    @functools.cached_property
    def fixed_row_bytes(self) -> int | None:
        """The bytes of reading any row; None if they depend on the row."""
        sizes = {
            tuple(_fixed_bytes(index) for index in file.datasets)
            for file in self._file_map.files
        }
        row_sizes = sizes.pop()
        return None if sizes or None in row_sizes else sum(filter(None, row_sizes))

    @property
    def file_count(self) -> int:
        """The number of files."""
        return self._rows.file_count

    def __len__(self) -> int:
        return len(self._rows)

    def describe(self) -> str:
        """See `RowSource.describe`."""
        return self._rows.describe()

    def shard_files(self, workers: int, worker: int) -> DryRows:
        """See `FileSource.shard_files`."""
        return DryRows(self._rows.shard_files(workers, worker), self._files)

    def chunk_layout(self) -> ChunkLayout:
        """See `ChunkedSource.chunk_layout`."""
        return self._rows.chunk_layout()

    def reserve_cache(self, rows: int) -> None:
        """See `ChunkedSource.reserve_cache`."""
        self._cache.capacity_bytes = self._file_map.cache_bytes_for(rows)

    def retain(self) -> None:
        """See `ChunkedSource.retain`; there is nothing to close."""

    def release(self, keep_files: bool = False) -> None:
        """See `ChunkedSource.release`."""

    def read(self, rows: Rows) -> Rows:
        """Return the numbers of the rows, and count the reads of these rows."""
        parts = list(self._file_map.cut(rows))
        if needed := list(self._file_map.blocks_in(parts)):
            self._cache.get(needed, self._decode)
        for part in parts if rows.size else []:
            self._opened.add(part.file)
            for index in self._file_map.files[part.file].datasets:
                if not index.is_in_blocks:
                    self.read_bytes += _row_bytes(index, part.rows)
        return rows

    def _decode(self, key: tuple[int, ...]) -> _Block:
        file, field, block = key
        index = self._file_map.files[file].datasets[field]
        decoded_bytes = len(block_rows(index, block)) * index.row_bytes
        self.decoded_chunks += 1
        if index.method is ReadMethod.CHUNKS:
            across = math.prod(index.grid[1:])
            sizes = index.sizes[block * across : (block + 1) * across]
            self.read_bytes += int(sizes.sum())
        else:
            self.read_bytes += decoded_bytes
        return _Block(decoded_bytes)


def stored_bytes(index: DatasetIndex) -> int:
    """Return the bytes of all rows in the file; in memory where h5py reads them."""
    if index.method is ReadMethod.CHUNKS:
        return int(index.sizes.sum())
    if index.method is not ReadMethod.BYTES:
        return index.row_bytes * index.shape[0]
    written = int((index.offsets >= 0).sum())
    return index.dtype.itemsize * math.prod(index.chunk) * written


def _fixed_bytes(index: DatasetIndex) -> int | None:
    """Return the bytes of reading any row; None if they depend on the row."""
    if index.is_in_blocks or index.fill:
        return None
    if index.method is ReadMethod.H5PY:
        return index.row_bytes
    return math.prod(index.grid[1:]) * index.chunk_row_bytes


def _row_bytes(index: DatasetIndex, rows: Rows) -> int:
    """Return the bytes in the file of some rows that do not lie in filtered chunks."""
    if (each := _fixed_bytes(index)) is not None or index.row_bytes == 0:
        return rows.size * (each or 0)
    offsets = index.offsets.reshape(-1, math.prod(index.grid[1:]))
    is_written = offsets[rows // index.chunk[0]] >= 0
    return int(is_written.sum()) * index.chunk_row_bytes


class Share(NamedTuple):
    """One rank's batches, requested as in a job.

    Args:
      pipeline: of batches.
      source: of its rows.
      part: this rank's rows of each batch.
      is_in_order: whether rows come in the order of the files.
      reads_example: whether a row is read before the first step.
    """

    pipeline: Batch
    source: DryRows
    part: BatchShare
    is_in_order: bool
    reads_example: bool

    @property
    def steps(self) -> int:
        """The number of batches."""
        steps = self.pipeline.length
        assert steps is not None
        return steps

    def positions(self, step: int) -> range:
        """Return the positions before batching of this rank's rows at a step."""
        if not 0 <= step < self.steps:
            return range(0)
        return self.pipeline.positions(FIRST_EPOCH, step, self.part)

    @property
    def sizes(self) -> tuple[int, int]:
        """The rows of this rank in each batch but the last, and in the last."""
        return len(self.positions(0)), len(self.positions(self.steps - 1))

    @property
    def rows(self) -> int:
        """The rows of this rank in an epoch."""
        each, last = self.sizes
        return each * max(0, self.steps - 1) + last

    def count_empty(self, steps: int) -> int:
        """Return the number of the job's steps without rows for this rank."""
        each, last = self.sizes
        full = max(0, self.steps - 1)
        return steps - (full if each else 0) - (1 if last else 0)

    @property
    def group(self) -> int:
        """The number of steps that are read at a time."""
        return reader.steps_per_read(self.pipeline, self.part.replicas)

    def begin(self) -> None:
        """Reset the counts, and request the rows needed before the first step."""
        self.source.restart()
        if self.reads_example:
            self.pipeline.example(FIRST_EPOCH)

    def ask(self, steps: range) -> None:
        """Request the rows of some steps from the source."""
        for first in range(steps.start, steps.stop, self.group):
            several = range(first, min(first + self.group, steps.stop))
            self.pipeline.local_batches(FIRST_EPOCH, several, self.part)


def shares_of(
    dataset: Dataset, policy: AutoShardPolicy, ranks: int, is_in_order: bool
) -> list[Share]:
    """Return the share of each rank of a dataset over `DryRows`.

    Raises:
      ArgumentError: the policy is FILE, and there are fewer files than ranks.
    """
    is_own = policy is AutoShardPolicy.FILE
    shares = []
    # With OFF all ranks get the same rows
    for rank in range(1 if policy is AutoShardPolicy.OFF else ranks):
        pipeline = divide(dataset.pipeline, policy, ranks, rank)
        assert isinstance(pipeline, Batch)
        (source,) = pipeline.sources
        assert isinstance(source, DryRows)
        part = BatchShare(ranks, rank) if is_global(policy) else WHOLE
        shares.append(Share(pipeline, source, part, is_in_order, reads_example=is_own))
    return shares * (ranks // len(shares))


class Reads(NamedTuple):
    """The reads of one rank in an epoch.

    Args:
      read_bytes: stored bytes of rows or chunks; bytes in memory where h5py reads.
      decoded_chunks: number of rows of chunks decoded, including repeated decoding
        after eviction from the cache.
      files: number of files; None if not counted.
    """

    read_bytes: int
    decoded_chunks: int
    files: int | None


def count_reads(shares: Sequence[Share]) -> dict[int, Reads]:
    """Return the reads by rank: of all, a sample, or none if that takes too long."""
    distinct = list(dict.fromkeys(shares))
    costs = {share: _cost(share) for share in distinct}
    count = _go_through
    if sum(costs.values()) > _BUDGET_ROWS:
        if all(share.source.fixed_row_bytes is not None for share in distinct):
            count = _multiply
        else:
            distinct = _sample([share for share in distinct if share.rows])
            if sum(costs[share] for share in distinct) > _BUDGET_ROWS:
                return {}
    reads = {share: count(share) for share in distinct}
    return {rank: reads[share] for rank, share in enumerate(shares) if share in reads}


def _cost(share: Share) -> float:
    """Return the cost of going through an epoch, in rows."""
    rows, asked = share.rows, _CALL_ROWS * share.steps / share.group
    if (mixed := share.pipeline.chunk_shuffle(FIRST_EPOCH)) is not None:
        part = mixed.stripes_of(_stripe_starts(share, mixed)).size / mixed.stripes
        return asked + rows + len(share.source) * part
    if share.is_in_order:
        return asked + rows
    # A permutation computes the rows of other ranks as well
    if not share.source.chunked_datasets:
        return asked + len(share.source)
    lookups = _LOOKUP_ROWS * len(share.source.file_map.files[0].datasets)
    return asked + len(share.source) + rows * lookups


def _go_through(share: Share) -> Reads:
    """Count a whole epoch."""
    share.begin()
    share.ask(range(share.steps if share.rows else 0))
    source = share.source
    return Reads(source.read_bytes, source.decoded_chunks, source.opened_files)


def _multiply(share: Share) -> Reads:
    """Multiply: all rows take the same number of bytes."""
    rows = share.rows + share.reads_example
    return Reads(rows * (share.source.fixed_row_bytes or 0), 0, None)


def _sample(shares: Sequence[Share]) -> list[Share]:
    """Return a few shares at equal distances, with the first and the last."""
    places = np.linspace(0, len(shares) - 1, min(_SAMPLED_RANKS, len(shares)))
    return [shares[i] for i in places.astype(int).tolist()]


def kept_bytes(share: Share) -> int:
    """Return the largest number of bytes of decoded chunks in a rank's cache."""
    limit = hdf5_rows.KEPT_BYTES
    if (mixed := share.pipeline.chunk_shuffle(FIRST_EPOCH)) is not None:
        rows = mixed.rows_in_use(_stripe_starts(share, mixed))
        limit = share.source.file_map.cache_bytes_for(rows)
    return min(limit, share.source.chunked_bytes)


def _stripe_starts(share: Share, mixed: ChunkShuffle) -> Indices:
    """Return a position of the first batch in each stripe of a rank's slice."""
    positions = share.positions(0)
    stripe_start = positions.start - positions.start % mixed.stripe_rows
    return np.arange(stripe_start, positions.stop, mixed.stripe_rows)
