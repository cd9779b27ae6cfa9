"""Plan what a job will read, rank by rank, without MPI."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mpidist.data.dataset import Dataset
from mpidist.data.distributed.reader import count_steps
from mpidist.data.hdf5.chunks import filter_name
from mpidist.data.hdf5.files import list_files
from mpidist.data.hdf5.index import DatasetIndex, choose_datasets
from mpidist.data.hdf5.rows import Hdf5Rows
from mpidist.data.map_dataset import SourceMapDataset
from mpidist.options import AutoShardPolicy
from mpidist.tools.plan.parts import (
    DatasetPart,
    InputPlan,
    LayoutPart,
    NodePart,
    OrderPart,
    RankGroup,
    ReadPart,
    Request,
    SourcePart,
    StepPart,
)
from mpidist.tools.plan.reads import (
    FIRST_EPOCH,
    DryRows,
    Reads,
    Share,
    count_reads,
    kept_bytes,
    shares_of,
    stored_bytes,
)

__all__ = ["make_plan"]


def make_plan(request: Request) -> InputPlan:
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
    source = DryRows(Hdf5Rows(paths, tuple(names)))
    is_in_order = not request.is_shuffled
    dataset = _dataset(request, source)
    shares = shares_of(dataset, request.policy, request.ranks, is_in_order)
    reads = count_reads(shares)
    groups = _groups(shares, reads)
    order = _order(shares, is_in_order)
    total = _total(shares, groups, reads)
    return InputPlan(
        request=request,
        source=_source(source, names, others),
        order=order,
        steps=_steps(request, shares, len(source)),
        reads=total,
        groups=groups,
        node=_node(request, order.kept_bytes, total.read_bytes),
    )


def _dataset(request: Request, source: DryRows) -> Dataset:
    """Return the dataset of batches that a job would make."""
    dataset = Dataset(SourceMapDataset(source))
    if request.is_shuffled:
        window = request.window_chunks
        dataset = dataset.shuffle(seed=request.seed, window_chunks=window)
    return dataset.batch(request.batch_size, request.drop_remainder)


def _source(source: DryRows, names: Sequence[str], others: Sequence[str]) -> SourcePart:
    files = source.file_map.files
    sizes: Mapping[Path, int] = {file.path: file.state.size_bytes for file in files}
    fields = zip(*(file.datasets for file in files), strict=True)
    datasets = tuple(_dataset_part(*one) for one in zip(names, fields, strict=True))
    return SourcePart(
        files=len(files),
        fewest_rows=min(file.rows for file in files),
        most_rows=max(file.rows for file in files),
        file_bytes=sum(sizes.values()),
        rows=len(source),
        memory_bytes=sum(dataset.memory_bytes for dataset in datasets),
        datasets=datasets,
        other_datasets=tuple(others),
        chunks=sum(index.grid[0] for index in source.chunked_datasets),
        chunk_bytes=source.chunked_bytes,
    )


def _dataset_part(name: str, indexes: Sequence[DatasetIndex]) -> DatasetPart:
    alike = collections.defaultdict(list)
    for index in indexes:
        chunk = index.chunk if index.is_chunked else None
        filters = tuple(filter_name(code) for code, _ in index.filters)
        alike[chunk, filters, index.method.value, index.why].append(index)
    return DatasetPart(
        name,
        str(indexes[0].native),
        indexes[0].row_shape,
        indexes[0].row_bytes,
        sum(map(_memory_bytes, indexes)),
        sum(map(stored_bytes, indexes)),
        tuple(_layout(same, *kind) for kind, same in alike.items()),
    )


def _layout(
    indexes: Sequence[DatasetIndex],
    chunk: tuple[int, ...] | None,
    filters: tuple[str, ...],
    way: str,
    why: str,
) -> LayoutPart:
    size = indexes[0].dtype.itemsize * math.prod(chunk) if chunk else 0
    chunks = sum(math.prod(index.grid) for index in indexes) if chunk else 0
    return LayoutPart(len(indexes), chunk, size, chunks, filters, way, why)


def _memory_bytes(index: DatasetIndex) -> int:
    return index.row_bytes * index.shape[0]


def _order(shares: Sequence[Share], is_in_order: bool) -> OrderPart:
    kept = max(map(kept_bytes, shares))
    mixed = shares[0].pipeline.chunk_shuffle(FIRST_EPOCH)
    if mixed is None:
        kind = "files" if is_in_order else "permutation"
        return OrderPart(kind, None, None, None, None, kept)
    stripes = mixed.block_chunks, mixed.stripes, mixed.stripe_rows
    return OrderPart("blocks", mixed.layout.rows, *stripes, kept)


def _steps(request: Request, shares: Sequence[Share], all_rows: int) -> StepPart:
    steps = count_steps([share.steps for share in shares])
    rows = [share.rows for share in shares]
    mean = sum(rows) / len(rows)
    # With OFF every rank gets the same rows
    used_rows = rows[0] if request.policy is AutoShardPolicy.OFF else sum(rows)
    return StepPart(
        steps=steps,
        rows=sum(len(share.positions(0)) for share in shares),
        rows_in_last=sum(len(share.positions(steps - 1)) for share in shares),
        dropped_rows=all_rows - used_rows,
        fewest_rows=min(rows),
        mean_rows=mean,
        most_rows=max(rows),
        imbalance=max(rows) / mean - 1 if mean else 0.0,
    )


def _groups(
    shares: Sequence[Share], reads: Mapping[int, Reads]
) -> tuple[RankGroup, ...]:
    """Group the ranks that get equal numbers of rows."""
    steps = count_steps([share.steps for share in shares])
    by_rows = collections.defaultdict(list)
    for rank, share in enumerate(shares):
        last = len(share.positions(steps - 1))
        by_rows[share.rows, share.sizes[0], last, share.count_empty(steps)].append(rank)
    counted_rows = sum(shares[rank].rows for rank in reads)
    groups = []
    for key, ranks in by_rows.items():
        counted = [reads[rank] for rank in ranks if rank in reads]
        scale = 1 / max(1, len(counted))
        if reads and not counted:  # estimate from the rows of the counted ranks
            counted, scale = list(reads.values()), key[0] / counted_rows
        read_bytes = scale * sum(each.read_bytes for each in counted)
        chunks = scale * sum(each.decoded_chunks for each in counted)
        files = max(_count_files(shares[i], reads.get(i)) for i in ranks)
        totals = (read_bytes, chunks) if reads else (None, None)
        groups.append(RankGroup(tuple(_runs(ranks)), len(ranks), *key, files, *totals))
    return tuple(groups)


def _count_files(share: Share, reads: Reads | None) -> int:
    """Return the largest number of files from which a rank reads rows."""
    if reads is not None and reads.files is not None:
        return reads.files
    return min(share.source.filled_files, share.rows)


def _runs(ranks: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Yield the first and the last of each run of consecutive numbers."""
    for _, pairs in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        run = [rank for _, rank in pairs]
        yield run[0], run[-1]


def _total(
    shares: Sequence[Share], groups: Sequence[RankGroup], reads: Mapping[int, Reads]
) -> ReadPart:
    return ReadPart(
        read_bytes=_sum((g.read_bytes, g.count) for g in groups),
        decoded_chunks=_sum((g.decoded_chunks, g.count) for g in groups),
        counted_ranks=len(reads),
        is_exact=len(reads) == len(shares),
        are_files_counted=all(
            share.source.filled_files < 2 or (i in reads and reads[i].files is not None)
            for i, share in enumerate(shares)
        ),
    )


def _sum(parts: Iterable[tuple[float | None, int]]) -> int | None:
    """Return the sum of `value * count`; None if a value is not estimated."""
    total = 0.0
    for value, count in parts:
        if value is None:
            return None
        total += value * count
    return round(total)


def _node(request: Request, kept: int, read_bytes: int | None) -> NodePart | None:
    """Return the sums over the ranks of a node."""
    if request.ranks_per_node is None:
        return None
    ranks = min(request.ranks_per_node, request.ranks)
    nodes = -(-request.ranks // ranks)
    each = None if read_bytes is None else read_bytes / request.ranks * ranks
    return NodePart(nodes, ranks, kept * ranks, each)
