"""A plan as text, and as JSON, with notes on what is slow or surprising."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from mpidist.data.distributed.reader import is_global
from mpidist.data.hdf5.index import ReadMethod
from mpidist.data.sharding import BatchShare, even_sizes
from mpidist.data.shuffling import STRIPE_ROWS
from mpidist.options import AutoShardPolicy
from mpidist.tools.plan.parts import (
    DatasetPart,
    InputPlan,
    LayoutPart,
    RankGroup,
)
from mpidist.util.available_memory import as_text

__all__ = ["notes_on", "to_json", "to_text"]

_HUGE_BYTES = 16 << 20
_TINY_BYTES = 4 << 10
_MANY_CHUNKS = 1000
_UNEVEN = 0.05
_OFTEN = 1.5
_LISTED_RANKS = 8
_LISTED_RUNS = 3
_MOST_LINES = 10
_WIDTH = 80
_HEAD = ("ranks", "rows", "per step", "last step", "empty steps", "files", "reads")


def to_json(plan: InputPlan) -> str:
    """Return the plan and its notes as JSON."""
    fields = dataclasses.asdict(plan)
    fields["request"]["policy"] = plan.request.policy.name.lower()
    fields["notes"] = notes_on(plan)
    return json.dumps(fields, indent=1)


def to_text(plan: InputPlan) -> str:
    """Return the plan in a few lines, for any number of ranks."""
    lines = [*_wrap(_source(plan)), "", *_wrap(_job(plan)), "", *_table(plan)]
    notes = list(_wrap(f"- {note}" for note in notes_on(plan)))
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _wrap(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        start = line[: len(line) - len(line.lstrip())]
        yield textwrap.fill(
            line, _WIDTH, break_on_hyphens=False, subsequent_indent=f"{start}  "
        )


def _source(plan: InputPlan) -> Iterator[str]:
    source = plan.source
    each = ""
    if source.files > 1:
        each = f" ({source.fewest_rows:,} to {source.most_rows:,} in a file)"
    files, rows = _count(source.files, "file"), _count(source.rows, "row")
    yield (
        f"{files} of {as_text(source.file_bytes)}: {rows}{each}, "
        f"{as_text(source.memory_bytes)} in memory"
    )
    for dataset in source.datasets:
        about = "about " if any(layout.why for layout in dataset.layouts) else ""
        yield (
            f"  {dataset.name}: {dataset.dtype} {dataset.row_shape}, {about}"
            f"{as_text(dataset.stored_bytes)}, {_layouts(dataset)}"
        )


def _layouts(dataset: DatasetPart) -> str:
    if len(dataset.layouts) == 1:
        return _layout(dataset.layouts[0])
    return "; ".join(
        f"{_layout(one)} (in {_count(one.files, 'file')})" for one in dataset.layouts
    )


def _layout(layout: LayoutPart) -> str:
    why = f" ({layout.why})" if layout.why else ""
    if layout.chunk is None:
        return f"{layout.way}{why}" if why else f"contiguous: {layout.way}"
    filters = "".join(f", {name}" for name in layout.filters)
    return f"chunks of {layout.chunk}{filters}: {layout.way}{why}"


def _job(plan: InputPlan) -> Iterator[str]:
    request, steps, node = plan.request, plan.steps, plan.node
    sizes = f" of {steps.rows:,} rows"
    if steps.rows_in_last != steps.rows:
        sizes += f", the last of {steps.rows_in_last:,}"
    if steps.dropped_rows:
        sizes += f"; {steps.dropped_rows:,} rows are dropped"
    yield (
        f"{_count(request.ranks, 'rank')}, policy {request.policy.name}: "
        f"{_count(steps.steps, 'step')} per epoch{sizes}"
    )
    yield f"order: {_order(plan)}"
    yield (
        f"rows per rank: {_span([steps.fewest_rows, steps.most_rows])}, "
        f"mean {_plain(steps.mean_rows)}, imbalance {steps.imbalance:.1%}"
    )
    yield f"reads: {_reads(plan)}"
    if node is not None:
        reads = ""
        if node.read_bytes is not None:
            reads = f"reads {as_text(node.read_bytes)} per epoch, and "
        yield (
            f"nodes: {node.nodes:,} of {_count(node.ranks, 'rank')}; each {reads}keeps "
            f"up to {as_text(node.kept_bytes)} of chunks; cache() would keep "
            f"{as_text(plan.source.memory_bytes)}"
        )


def _order(plan: InputPlan) -> str:
    order, request = plan.order, plan.request
    if order.kind == "files":
        return "in file order"
    seed = "drawn by each job" if request.seed is None else str(request.seed)
    whose = " of a rank's files" if request.policy is AutoShardPolicy.FILE else ""
    if order.kind == "permutation":
        return f"exact permutation of all rows{whose}, seed {seed}"
    stripes = f" in each of {order.lanes:,} stripes" if (order.lanes or 1) > 1 else ""
    return (
        f"blocks of {_count(order.block_rows or 0, 'row')}{whose} in random order, "
        f"{order.window_blocks:,} at a time mixed{stripes}, seed {seed}"
    )


def _reads(plan: InputPlan) -> str:
    reads, chunks = plan.reads, plan.source.chunks
    kept = f"up to {as_text(plan.order.kept_bytes)} kept by each rank"
    if reads.read_bytes is None or reads.decoded_chunks is None:
        what = f"bytes read, and how often {_count(chunks, 'chunk')} are decoded"
        why = "the epoch is too long to count them"
        shown = f"not estimated: {what if chunks else 'bytes read'} ({why})"
        return f"{shown}; {kept}" if chunks else shown
    parts = [f"{as_text(reads.read_bytes)} per epoch by all ranks"]
    if chunks:
        times = reads.decoded_chunks / chunks
        parts.append(f"{_count(chunks, 'chunk')} decoded {times:,.2f} times, {kept}")
    if not reads.is_exact:
        ranks = f"{reads.counted_ranks:,} of {plan.request.ranks:,} ranks"
        parts.append(f"estimated from {ranks}")
    return "; ".join(parts)


def _table(plan: InputPlan) -> Iterator[str]:
    """Yield a line for each group of ranks, or for several groups if there are many."""
    groups = sorted(plan.groups, key=lambda group: group.ranks)
    lines = [[group] for group in groups]
    if len(groups) > _MOST_LINES:
        groups.sort(key=lambda group: group.rows)
        size = -(-len(groups) // _MOST_LINES)
        lines = [groups[i : i + size] for i in range(0, len(groups), size)]
    rows = [_HEAD, *(_cells(line, plan) for line in lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join([row[0].ljust(widths[0]), *cells[1:]])


def _cells(groups: Sequence[RankGroup], plan: InputPlan) -> tuple[str, ...]:
    ranks = _show_ranks(groups)
    if len(groups) > 1:
        ranks = f"{sum(group.count for group in groups):,} ranks"
    most = "" if plan.reads.are_files_counted else "<="
    shown = "-"
    if plan.reads.read_bytes is not None:
        read_bytes = sum((group.read_bytes or 0) * group.count for group in groups)
        mean = as_text(read_bytes / sum(group.count for group in groups))
        shown = mean if plan.reads.is_exact else f"~{mean}"
    return (
        ranks,
        _span([group.rows for group in groups]),
        _span([group.rows_per_step for group in groups]),
        _span([group.rows_in_last_step for group in groups]),
        _span([group.empty_steps for group in groups]),
        most + _span([group.files for group in groups]),
        shown,
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _plain(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}..{high:,}"


def notes_on(plan: InputPlan) -> list[str]:
    """Return sentences about what costs time, or may be surprising."""
    return [
        *_on_batches(plan),
        *_on_empty_batches(plan),
        *_on_files(plan),
        *_on_decoding(plan),
        *(note for dataset in plan.source.datasets for note in _on_chunks(dataset)),
    ]


def _show_ranks(groups: Iterable[RankGroup]) -> str:
    """Return "0-2, 5"; of many runs, the first."""
    runs = sorted(run for group in groups for run in group.ranks)
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:_LISTED_RUNS]]
    return ", ".join(shown) + (", ..." if len(runs) > _LISTED_RUNS else "")


def _on_batches(plan: InputPlan) -> Iterator[str]:
    batch, ranks = plan.request.batch_size, plan.request.ranks
    if plan.steps.steps == 0:
        rows = f"{plan.source.rows:,} rows make no batch of {batch:,}"
        yield f"there is no step: {rows if plan.source.rows else 'there are no rows'}"
    if batch % ranks == 0:
        return
    advice = " or ".join(f"{size:,}" for size in even_sizes(batch, ranks))
    if is_global(plan.request.policy):
        parts = [BatchShare(ranks, rank).of(batch) for rank in range(ranks)]
        sizes = [part.stop - part.start for part in parts]
        shown = ", ".join(map(str, sizes))
        if ranks > _LISTED_RANKS:
            shown = f"{min(sizes):,} to {max(sizes):,}"
        yield f"batch {batch:,} gives {ranks:,} ranks {shown} rows; use {advice}"
    else:
        each = -(-batch // ranks)
        yield (
            f"batch {batch:,} is not divisible by {ranks:,} ranks: each takes {each:,} "
            f"rows, {each * ranks:,} in total; use {advice}"
        )


def _on_empty_batches(plan: InputPlan) -> Iterator[str]:
    steps, last = plan.steps.steps, plan.steps.rows_in_last
    never = [group for group in plan.groups if steps and not group.rows]
    if never:
        which = _show_ranks(never)
        yield f"there are no rows at all for {_count_ranks(never)} ({which})"
    at_end = [g for g in plan.groups if g.rows and not g.rows_in_last_step]
    if at_end and is_global(plan.request.policy):
        yield (
            f"the last step's {last:,} rows leave none for {_count_ranks(at_end)} "
            f"({_show_ranks(at_end)}); --drop-remainder omits that step"
        )


def _count_ranks(groups: Iterable[RankGroup]) -> str:
    return _count(sum(group.count for group in groups), "rank")


def _on_files(plan: InputPlan) -> Iterator[str]:
    source, steps = plan.source, plan.steps
    if source.other_datasets:
        others = ", ".join(source.other_datasets[:_LISTED_RANKS])
        more = ", ..." if len(source.other_datasets) > _LISTED_RANKS else ""
        yield f"not read, because --datasets does not name them: {others}{more}"
    if plan.request.policy is not AutoShardPolicy.FILE or steps.imbalance <= _UNEVEN:
        return
    idle = sum(group.empty_steps * group.count for group in plan.groups)
    part = idle / (steps.steps * plan.request.ranks)
    cause = f"the files have {source.fewest_rows:,} to {source.most_rows:,} rows"
    if source.files % plan.request.ranks:
        cause += f", and {source.files:,} do not divide by {plan.request.ranks:,} ranks"
    yield (
        f"{cause}: one rank has {steps.imbalance:.1%} more rows than the mean, and "
        f"{part:.1%} of all batches are empty; --policy data divides every batch evenly"
    )


def _on_decoding(plan: InputPlan) -> Iterator[str]:
    """Yield how often chunks are decoded, if memory cannot keep them all."""
    source, order, decoded = plan.source, plan.order, plan.reads.decoded_chunks
    if source.chunk_bytes <= order.kept_bytes or not source.chunks or decoded is None:
        return
    times = decoded / source.chunks
    if plan.request.policy is AutoShardPolicy.OFF:
        times /= plan.request.ranks
    if times < _OFTEN:
        return
    each = max(group.rows_per_step for group in plan.groups)
    if order.kind == "permutation":
        cause = "rows come from all chunks at once"
        advice = "omit --window-chunks 0"
    elif order.kind == "blocks":
        cause = f"{order.lanes:,} stripes begin and end within chunks"
        advice = "smaller chunks, or batches, would be better"
        if each % (order.lane_rows or 1):
            whole = STRIPE_ROWS[-1] * plan.request.ranks
            cause = f"ranks share stripes, of {order.lane_rows} rows of a batch"
            advice = f"a batch of {whole:,} rows, or a multiple, gives ranks their own"
    else:
        cause = f"a rank's {each:,} rows of a batch are parts of chunks"
        advice = "--shuffle gives ranks separate chunks"
        if source.files >= plan.request.ranks:
            advice += ", --policy file whole files"
    yield f"chunks are decoded {times:.1f} times each per epoch, as {cause}; {advice}"


def _on_chunks(dataset: DatasetPart) -> Iterator[str]:
    """Yield notes on chunks that are too large or too small."""
    for layout in dataset.layouts:
        if layout.chunk is None or layout.way == ReadMethod.BYTES.value:
            continue
        together = dataset.row_bytes * layout.chunk[0]
        if together > _HUGE_BYTES:
            yield (
                f"{dataset.name}: reading one row decodes {layout.chunk[0]:,} rows "
                f"({as_text(together)}); chunks of 1 MiB are better"
            )
        if layout.chunk_bytes < _TINY_BYTES and layout.chunks > _MANY_CHUNKS:
            yield (
                f"{dataset.name}: {layout.chunks:,} chunks have only "
                f"{as_text(layout.chunk_bytes)} each; chunks of 1 MiB are better"
            )
