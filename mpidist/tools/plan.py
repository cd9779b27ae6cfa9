"""`mpidist plan`: what each rank of a job will read, without MPI.

The job's own datasets run over `DryRows`, which read nothing, so that no formula is
repeated here. If that takes too long for all ranks, some are counted, or none.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import itertools
import json
import math
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpidist.data.batching import Batch
from mpidist.data.dataset import Dataset
from mpidist.data.distributed.reader import divide, is_global, steps_per_read
from mpidist.data.map_dataset import Epoch, SourceMapDataset
from mpidist.data.shuffling import STRIPE_ROWS, ChunkShuffle
from mpidist.hdf5 import read as hdf5_rows
from mpidist.hdf5.chunks import filter_name
from mpidist.hdf5.files import list_files
from mpidist.hdf5.index import DatasetIndex, ReadMethod, choose_datasets
from mpidist.hdf5.read import Hdf5Rows, block_rows
from mpidist.options import AutoShardPolicy
from mpidist.util.available_memory import as_text
from mpidist.util.representation import counted
from mpidist.util.shares import WHOLE, BatchShare, even_sizes

Rows = npt.NDArray[np.int64]
_EPOCH = Epoch()  # the first epoch, which has as many rows as any
_COUNTING_SECONDS = 5.0
_HUGE_BYTES = 16 << 20
_TINY_BYTES = 4 << 10
_MANY_CHUNKS = 1000
_UNEVEN = 0.05
_OFTEN = 1.5
_MOST_LISTED = 8
_MOST_LINES = 10
# Of the table, between ranks and reads
_COLUMNS = ("rows", "rows_per_step", "rows_in_last_step", "empty_steps", "files")


@dataclasses.dataclass(frozen=True)
class Request:
    """The arguments of the command; see `mpidist plan --help`."""

    files: Sequence[str]
    batch: int
    ranks: int
    datasets: Sequence[str] = ()
    policy: str = "data"
    drop_remainder: bool = False
    shuffle: bool = False
    seed: int | None = None
    window_chunks: int | None = None
    ranks_per_node: int | None = None


@dataclasses.dataclass(frozen=True)
class DatasetPlan:
    """One dataset, in all files."""

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    stored_bytes: int  # of all rows in the files; in memory where h5py reads them
    layouts: dict[str, int]  # and how many files have them


@dataclasses.dataclass(frozen=True)
class RankGroup:
    """Successive ranks that get equal numbers of rows per epoch."""

    first: int
    last: int
    rows: int
    rows_per_step: int  # of each batch but the last
    rows_in_last_step: int  # of the job
    empty_steps: int
    files: int  # at most
    read_bytes: float | None  # in the mean of those that were counted

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self.last - self.first + 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a job reads in an epoch; None for what took too long to count."""

    request: Request
    files: int
    fewest_rows: int  # of a file
    most_rows: int
    file_bytes: int
    rows: int
    memory_bytes: int  # of all rows
    datasets: list[DatasetPlan]
    chunks: int  # rows of chunks that are decoded whole
    order: str
    steps: int
    rows_per_step: int  # of all ranks
    rows_in_last_step: int
    dropped_rows: int
    mean_rows: float  # of a rank
    imbalance: float  # of the largest number of rows of a rank over the mean, less 1
    kept_bytes: int  # of decoded chunks in each rank's memory, at most
    counted_ranks: int  # from which the reads are estimated if these are not all
    read_bytes: int | None  # as they are stored; as in memory where h5py reads
    decoded_chunks: int | None  # again if not kept, or by another rank
    groups: list[RankGroup]
    notes: list[str]  # on what costs time, or may be surprising


class DryRows(Hdf5Rows):
    """Rows of which only the numbers are read: what a job would read is counted.

    Blocks of chunks, which are not decoded, go through the cache as in a job.
    """

    read_bytes = decoded_chunks = 0

    def restart(self) -> None:
        """Reset the counts and the cache."""
        self._start()
        self.read_bytes = self.decoded_chunks = 0

    def shard_files(self, workers: int, worker: int) -> DryRows:
        """See `FileSource.shard_files`; no file is indexed again."""
        share = DryRows(self._paths[worker::workers], tuple(self._names), threads=1)
        share.set_index(self.file_map().files[worker::workers])
        return share

    def read(self, rows: Rows) -> Rows:
        """Return the numbers of the rows, and count the reads of these rows."""
        file_map = self.file_map()
        parts = list(file_map.cut(rows))
        if needed := list(file_map.blocks_in(parts)):
            self._blocks.get(needed, self._load_block)
        for part in parts:
            indexes = file_map.files[part.file].datasets
            self.read_bytes += sum(_alone_bytes(each, part.rows) for each in indexes)
        return rows

    def _load_block(self, key: tuple[int, ...]) -> Any:
        file, field, block = key
        index = self._index(file, field)
        decoded_bytes = stored_bytes = len(block_rows(index, block)) * index.row_bytes
        if index.method is ReadMethod.CHUNKS:
            across = math.prod(index.grid[1:])
            stored_bytes = int(index.sizes[block * across :][:across].sum())
        self.decoded_chunks += 1
        self.read_bytes += stored_bytes
        # The cache only uses the size, which this array has without the memory
        return np.broadcast_to(np.uint8(0), decoded_bytes)

    @functools.cached_property
    def indexes(self) -> list[DatasetIndex]:
        """The indexes of all datasets in all files."""
        return [index for file in self.file_map().files for index in file.datasets]

    @functools.cached_property
    def decoded(self) -> list[DatasetIndex]:
        """Those of datasets whose chunks are decoded whole."""
        return [index for index in self.indexes if index.is_in_blocks]

    @functools.cached_property
    def decoded_bytes(self) -> int:
        """The bytes of all their rows in memory."""
        return _memory_bytes(self.decoded)

    @functools.cached_property
    def filled_files(self) -> int:
        """The number of files that have rows."""
        return sum(file.rows > 0 for file in self.file_map().files)

    @functools.cached_property
    def bytes_of_any_row(self) -> int | None:
        """The bytes that each row takes; None if they depend on the row."""
        if self.decoded or any(index.fill for index in self.indexes):
            return None
        one = np.zeros(1, np.int64)
        filled = [file.datasets for file in self.file_map().files if file.rows]
        sizes = {sum(_alone_bytes(index, one) for index in each) for each in filled}
        return sizes.pop() if len(sizes) == 1 else None


def _alone_bytes(index: DatasetIndex, rows: Rows) -> int:
    """Return the bytes in the file of some rows, if they are not in decoded chunks."""
    if index.is_in_blocks or rows.size == 0 or index.row_bytes == 0:
        return 0
    if index.method is ReadMethod.H5PY:
        return rows.size * index.row_bytes
    offsets = index.offsets.reshape(-1, math.prod(index.grid[1:]))
    is_written = offsets[rows // index.chunk[0]] >= 0
    return int(is_written.sum()) * index.chunk_row_bytes


def _memory_bytes(indexes: Iterable[DatasetIndex]) -> int:
    return sum(index.row_bytes * index.shape[0] for index in indexes)


def _stored_bytes(index: DatasetIndex) -> int:
    if index.method is ReadMethod.CHUNKS:
        return int(index.sizes.sum())
    if index.method is not ReadMethod.BYTES:
        return _memory_bytes([index])
    written = int((index.offsets >= 0).sum())
    return index.dtype.itemsize * math.prod(index.chunk) * written


@dataclasses.dataclass(eq=False)
class _Share:
    """One rank's rows of the job's batches, which come from `DryRows`."""

    pipeline: Batch
    source: DryRows
    part: BatchShare
    steps: int
    first: int  # rows in the first batch, and in each but the last
    last: int
    read_bytes: int | None = None  # None before the reads are counted
    decoded_chunks: int = 0

    @property
    def rows(self) -> int:
        return self.first * max(0, self.steps - 1) + self.last

    def kept_bytes(self) -> int:
        """Return the largest number of bytes of decoded chunks in the cache."""
        limit, mixed = hdf5_rows.KEPT_BYTES, self.pipeline.chunk_shuffle(_EPOCH)
        if mixed is not None and self.steps:
            rows = len(self._stripes(mixed)) * mixed.block_rows
            limit = self.source.file_map().cache_bytes_for(rows)
        return min(limit, self.source.decoded_bytes)

    def _stripes(self, mixed: ChunkShuffle) -> set[int]:
        turn, size = mixed.turn, self.pipeline.batch_size
        batch = self.pipeline.positions(_EPOCH, 0, self.part)
        if len(batch) >= math.gcd(turn, size):  # slices begin in all of these places
            return set(range(mixed.stripes))
        # From here on, batches begin at the same places in a turn
        steps = min(self.steps, math.lcm(turn, size) // size)
        starts = batch.start + size * np.arange(steps)
        inside = np.append(np.arange(0, len(batch), STRIPE_ROWS), len(batch) - 1)
        return mixed.stripes_of((starts[:, np.newaxis] + inside).reshape(-1))


def _shares(dataset: Dataset, policy: AutoShardPolicy, ranks: int) -> list[_Share]:
    shares = []
    # With OFF all ranks get the same rows
    for rank in range(1 if policy is AutoShardPolicy.OFF else ranks):
        # A shuffle of its own, which remembers what was read
        own = dataset.pipeline.replace_parents(copy.copy)
        pipeline = divide(own, policy, ranks, rank)
        assert isinstance(pipeline, Batch)
        (source,) = pipeline.sources
        assert isinstance(source, DryRows)
        part = BatchShare(ranks, rank) if is_global(policy) else WHOLE
        steps = pipeline.length or 0
        ends = (0, steps - 1) if steps else ()
        rows = [len(pipeline.positions(_EPOCH, i, part)) for i in ends] or [0]
        shares.append(_Share(pipeline, source, part, steps, rows[0], rows[-1]))
    return shares * (ranks // len(shares))


def _count_reads(shares: Sequence[_Share], policy: AutoShardPolicy) -> None:
    """Count what all ranks read, or some at equal distances if that takes too long."""
    # Multiples of the golden ratio spread any number of ranks evenly
    spread = {share: i * 0.618034 % 1 for i, share in enumerate(dict.fromkeys(shares))}
    deadline = time.monotonic() + _COUNTING_SECONDS
    for share in sorted(spread, key=lambda share: (not share.rows, spread[share])):
        pipeline, source = share.pipeline, share.source
        source.restart()
        if policy is AutoShardPolicy.FILE:  # ranks without rows need the dtypes
            pipeline.example(_EPOCH)
        if (row_bytes := source.bytes_of_any_row) is not None:
            share.read_bytes = source.read_bytes + share.rows * row_bytes
            continue
        several = steps_per_read(pipeline, share.part.replicas)
        for first in range(0, share.steps if share.rows else 0, several):
            if time.monotonic() > deadline:
                return
            steps = range(first, min(first + several, share.steps))
            pipeline.local_batches(_EPOCH, steps, share.part)
        share.read_bytes = source.read_bytes
        share.decoded_chunks = source.decoded_chunks


def _total(shares: Sequence[_Share], counts: Sequence[int]) -> int | None:
    """Return the sum of all ranks, from counts of those that were counted."""
    if len(counts) in (0, len(shares)):
        return sum(counts) if counts else None
    counted_rows = sum(share.rows for share in shares if share.read_bytes is not None)
    return round(sum(share.rows for share in shares) / counted_rows * sum(counts))


def make_plan(request: Request) -> Plan:
    """Return the plan of a job.

    Raises:
      DataError: a file or a dataset is missing, cannot be read, or does not fit the
        others.
      ArgumentError: a number that no job could use, or fewer files than ranks.
    """
    paths = [path for files in request.files for path in list_files(files)]
    names, others = list(request.datasets), list[str]()
    if not names:
        names, others = choose_datasets(paths[0])
    source = DryRows(paths, tuple(names), threads=1)
    files = source.file_map().files
    dataset = Dataset(SourceMapDataset(source))
    if request.shuffle:
        window = request.window_chunks
        dataset = dataset.shuffle(seed=request.seed, window_chunks=window)
    dataset = dataset.batch(request.batch, request.drop_remainder)
    policy = AutoShardPolicy[request.policy.upper()]
    shares = _shares(dataset, policy, request.ranks)
    _count_reads(shares, policy)
    reads = [share for share in shares if share.read_bytes is not None]
    groups, rows = _groups(shares), [share.rows for share in shares]
    mean_rows = sum(rows) / len(rows)
    mixed = shares[0].pipeline.chunk_shuffle(_EPOCH)
    plan = Plan(
        request=request,
        files=len(files),
        fewest_rows=min(file.rows for file in files),
        most_rows=max(file.rows for file in files),
        file_bytes=sum({file.path: file.state.size_bytes for file in files}.values()),
        rows=len(source),
        memory_bytes=_memory_bytes(source.indexes),
        datasets=[_dataset_plan(each) for each in zip(*(f.datasets for f in files))],
        chunks=sum(index.grid[0] for index in source.decoded),
        order=_order(request, mixed),
        steps=max(share.steps for share in shares),
        rows_per_step=sum(share.first for share in shares),
        rows_in_last_step=sum(each.rows_in_last_step * each.count for each in groups),
        # With OFF every rank gets the same rows
        dropped_rows=len(source) - (rows[0] if request.policy == "off" else sum(rows)),
        mean_rows=mean_rows,
        imbalance=max(rows) / mean_rows - 1 if mean_rows else 0.0,
        kept_bytes=max(share.kept_bytes() for share in dict.fromkeys(shares)),
        counted_ranks=len(reads),
        read_bytes=_total(shares, [share.read_bytes or 0 for share in reads]),
        decoded_chunks=_total(shares, [share.decoded_chunks for share in reads]),
        groups=groups,
        notes=[],
    )
    on_files = _on_files(plan, others, source.decoded)
    on_decoding = _on_decoding(plan, mixed, source.decoded_bytes)
    return dataclasses.replace(plan, notes=[*_on_ranks(plan), *on_files, *on_decoding])


def _groups(shares: Sequence[_Share]) -> list[RankGroup]:
    steps = max(share.steps for share in shares)

    def numbers(share: _Share) -> tuple[int, int, int, int, int]:
        last = share.last if share.steps == steps else 0
        full = max(0, share.steps - 1) if share.first else 0
        empty, files = steps - full - (share.last > 0), share.source.filled_files
        return share.rows, share.first, last, empty, min(share.rows, files)

    groups, first = [], 0
    for key, members in itertools.groupby(shares, numbers):
        reads = [share.read_bytes for share in members]
        known = [each for each in reads if each is not None]
        mean, stop = sum(known) / len(known) if known else None, first + len(reads)
        groups.append(RankGroup(first, stop - 1, *key, mean))
        first = stop
    return groups


def _dataset_plan(indexes: Sequence[DatasetIndex]) -> DatasetPlan:
    layouts = collections.Counter(map(_layout, indexes))
    first, stored_bytes = indexes[0], sum(map(_stored_bytes, indexes))
    return DatasetPlan(
        first.name, str(first.native), first.row_shape, stored_bytes, dict(layouts)
    )


def _layout(index: DatasetIndex) -> str:
    why = f" ({index.why})" if index.why else ""
    if not index.is_chunked:
        return f"{'' if why else 'contiguous: '}{index.method.value}{why}"
    filters = "".join(f", {filter_name(code)}" for code, _ in index.filters)
    return f"chunks of {index.chunk}{filters}: {index.method.value}{why}"


def _order(request: Request, mixed: ChunkShuffle | None) -> str:
    if not request.shuffle:
        return "in file order"
    seed = "drawn by each job" if request.seed is None else str(request.seed)
    whose = " of a rank's files" if request.policy == "file" else ""
    if mixed is None:
        return f"exact permutation of all rows{whose}, seed {seed}"
    stripes = f" in each of {mixed.stripes:,} stripes" if mixed.stripes > 1 else ""
    return (
        f"blocks of {counted(mixed.layout.rows, 'row')}{whose} in random order, "
        f"{mixed.block_chunks:,} at a time mixed{stripes}, seed {seed}"
    )


def _on_ranks(plan: Plan) -> Iterator[str]:
    batch, ranks, groups = plan.request.batch, plan.request.ranks, plan.groups
    policy = plan.request.policy
    if plan.steps == 0:
        rows = f"{plan.rows:,} rows make no batch of {batch:,}"
        yield f"there is no step: {rows if plan.rows else 'there are no rows'}"
    if batch % ranks:
        parts = [BatchShare(ranks, rank).of(batch) for rank in range(ranks)]
        sizes = [part.stop - part.start for part in parts]
        shown = ", ".join(map(str, sizes)) if ranks <= _MOST_LISTED else _span(sizes)
        text = f"{ranks:,} ranks {shown} rows"
        if policy != "data":
            text = f"each rank {sizes[0]:,} rows, {sizes[0] * ranks:,} in total"
        advice = " or ".join(f"{size:,}" for size in even_sizes(batch, ranks))
        yield f"batch {batch:,} gives {text}; use {advice}"
    never = sum(group.count for group in groups if not group.rows)
    if plan.steps and never:
        yield f"there are no rows at all for {counted(never, 'rank')}"
    at_end = sum(g.count for g in groups if g.rows and not g.rows_in_last_step)
    if at_end and policy == "data":
        yield (
            f"the last step's {plan.rows_in_last_step:,} rows leave none for "
            f"{counted(at_end, 'rank')}; --drop-remainder omits that step"
        )
    if policy == "file" and plan.imbalance > _UNEVEN:
        cause = f", and {plan.files:,} do not divide by {ranks:,} ranks"
        yield (
            f"the files have {plan.fewest_rows:,} to {plan.most_rows:,} rows"
            f"{cause if plan.files % ranks else ''}: one rank has {plan.imbalance:.1%} "
            "more rows than the mean; --policy data divides every batch evenly"
        )


def _on_files(
    plan: Plan, others: Sequence[str], decoded: Sequence[DatasetIndex]
) -> Iterator[str]:
    if others:
        more = ", ..." if len(others) > _MOST_LISTED else ""
        names = ", ".join(others[:_MOST_LISTED])
        yield f"not read, because --datasets does not name them: {names}{more}"
    chunks = collections.Counter[tuple[str, int, int, int]]()
    for index in decoded:
        rows, size = index.chunk[0], index.dtype.itemsize * math.prod(index.chunk)
        kind = index.name, rows, rows * index.row_bytes, size
        chunks[kind] += math.prod(index.grid)
    for (name, rows, block_bytes, size), count in chunks.items():
        decodes = f"reading one row decodes {rows:,} rows ({as_text(block_bytes)})"
        have = f"{count:,} chunks have only {as_text(size)} each"
        is_tiny = size < _TINY_BYTES and count > _MANY_CHUNKS
        for what, holds in ((decodes, block_bytes > _HUGE_BYTES), (have, is_tiny)):
            if holds:
                yield f"{name}: {what}; chunks of 1 MiB are better"


def _on_decoding(
    plan: Plan, mixed: ChunkShuffle | None, all_bytes: int
) -> Iterator[str]:
    """Yield how often chunks are decoded, if memory cannot keep them all."""
    ranks, rows = plan.request.ranks, max(group.rows_per_step for group in plan.groups)
    if plan.decoded_chunks is None or all_bytes <= plan.kept_bytes:
        return
    times = plan.decoded_chunks / plan.chunks
    times /= ranks if plan.request.policy == "off" else 1
    if times < _OFTEN:
        return
    if mixed is None and plan.request.shuffle:
        why = "rows come from all chunks at once; omit --window-chunks 0"
    elif mixed is None:
        why = f"a rank's {rows:,} rows of a batch are parts of chunks; --shuffle gives "
        why += "ranks separate chunks"
    elif rows % STRIPE_ROWS or mixed.turn % plan.request.batch:
        why = f"ranks share stripes, runs of {STRIPE_ROWS} rows"
        sizes = range(STRIPE_ROWS * ranks, mixed.turn + 1, STRIPE_ROWS * ranks)
        if fitting := [f"{size:,}" for size in sizes if mixed.turn % size == 0]:
            why += f"; a batch of {' or '.join(fitting)} rows gives ranks their own"
    else:
        why = f"{mixed.stripes:,} stripes begin and end within chunks; smaller chunks, "
        why += "or batches, would be better"
    yield f"chunks are decoded {times:.1f} times each per epoch, as {why}"


def to_json(plan: Plan) -> str:
    """Return the plan as JSON."""
    return json.dumps(dataclasses.asdict(plan), indent=1)


def to_text(plan: Plan) -> str:
    """Return the plan in a few lines, for any number of ranks."""
    notes = [f"- {note}" for note in plan.notes]
    parts = [_wrap(_files(plan)), _wrap(_job(plan)), _table(plan), _wrap(notes)]
    return "\n\n".join(filter(None, map("\n".join, parts)))


def _wrap(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        indent = line[: len(line) - len(line.lstrip())] + "  "
        yield textwrap.fill(line, 80, break_on_hyphens=False, subsequent_indent=indent)


def _files(plan: Plan) -> Iterator[str]:
    each = f" ({plan.fewest_rows:,} to {plan.most_rows:,} in a file)"
    yield (
        f"{counted(plan.files, 'file')} of {as_text(plan.file_bytes)}: "
        f"{counted(plan.rows, 'row')}{each if plan.files > 1 else ''}, "
        f"{as_text(plan.memory_bytes)} in memory"
    )
    for dataset in plan.datasets:
        layouts = "; ".join(
            text if len(dataset.layouts) == 1 else f"{text} (in {counted(n, 'file')})"
            for text, n in dataset.layouts.items()
        )
        about = "about " if "by h5py" in layouts else ""
        yield (
            f"  {dataset.name}: {dataset.dtype} {dataset.row_shape}, {about}"
            f"{as_text(dataset.stored_bytes)}, {layouts}"
        )


def _job(plan: Plan) -> Iterator[str]:
    request = plan.request
    sizes = f" of {plan.rows_per_step:,} rows"
    if plan.rows_in_last_step != plan.rows_per_step:
        sizes += f", the last of {plan.rows_in_last_step:,}"
    if plan.dropped_rows:
        sizes += f"; {plan.dropped_rows:,} rows are dropped"
    yield (
        f"{counted(request.ranks, 'rank')}, policy {request.policy.upper()}: "
        f"{counted(plan.steps, 'step')} per epoch{sizes}"
    )
    yield f"order: {plan.order}"
    mean = f"{plan.mean_rows:,.1f}".removesuffix(".0")
    rows = _span([group.rows for group in plan.groups])
    yield f"rows per rank: {rows}, mean {mean}, imbalance {plan.imbalance:.1%}"
    reads = "not estimated, as the epoch is too long to count them"
    if plan.read_bytes is not None:
        reads = f"{as_text(plan.read_bytes)} per epoch by all ranks"
    if plan.chunks:
        decoded = ""
        if plan.decoded_chunks is not None:
            decoded = f" decoded {plan.decoded_chunks / plan.chunks:,.2f} times"
        kept = f"up to {as_text(plan.kept_bytes)} kept by each rank"
        reads += f"; {counted(plan.chunks, 'chunk')}{decoded}, {kept}"
    if 0 < plan.counted_ranks < request.ranks:
        reads += f"; estimated from {plan.counted_ranks:,} of {request.ranks:,} ranks"
    yield f"reads: {reads}"
    if request.ranks_per_node is not None:
        ranks = min(request.ranks_per_node, request.ranks)
        reads = as_text((plan.read_bytes or 0) / request.ranks * ranks)
        reads = f"reads {reads} per epoch, and " if plan.counted_ranks else ""
        yield (
            f"nodes: {-(-request.ranks // ranks):,} of {counted(ranks, 'rank')}; each "
            f"{reads}keeps up to {as_text(plan.kept_bytes * ranks)} of chunks; cache() "
            f"would keep {as_text(plan.memory_bytes)}"
        )


def _table(plan: Plan) -> Iterator[str]:
    """Yield a line for each group of ranks, or for several groups if there are many."""
    size = -(-len(plan.groups) // _MOST_LINES)
    about = "~" if plan.counted_ranks < plan.request.ranks else ""
    rows = [["ranks", *(name.replace("_", " ") for name in _COLUMNS), "reads"]]
    for start in range(0, len(plan.groups), size):
        several = plan.groups[start : start + size]
        first, last = several[0].first, several[-1].last
        ranks = f"{first}-{last}" if last > first else f"{first}"
        numbers = [_span([getattr(g, name) for g in several]) for name in _COLUMNS]
        reads = [group.read_bytes for group in several if group.read_bytes is not None]
        rows.append([ranks, *numbers, about + _span(reads, as_text) if reads else "-"])
    left, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    for ranks, *cells in rows:
        yield "  ".join([ranks.ljust(left), *map(str.rjust, cells, widths)])


def _span(numbers: Sequence[float], text: Callable[[Any], str] = "{:,}".format) -> str:
    """Return the least number and the largest, or both as one if they are equal."""
    return "..".join(dict.fromkeys([text(min(numbers)), text(max(numbers))]))
