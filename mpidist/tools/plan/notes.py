"""What is remarkable in a plan, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mpidist.data.distributed.reader import is_global
from mpidist.data.hdf5.index import ReadMethod
from mpidist.data.sharding import even_sizes, replica_slice
from mpidist.data.shuffling import LANE_ROWS
from mpidist.options import AutoShardPolicy
from mpidist.tools.plan.parts import DatasetPart, InputPlan, RankGroup
from mpidist.util.available_memory import as_text

__all__ = ["notes_on", "show_ranks"]

_HUGE_BYTES = 16 << 20
_TINY_BYTES = 4 << 10
_MANY_CHUNKS = 1000
_UNEVEN = 0.05
_OFTEN = 1.5
_LISTED_RANKS = 8
_LISTED_RUNS = 3


def notes_on(plan: InputPlan) -> list[str]:
    """Return sentences about what costs time, or may surprise."""
    return [
        *_on_batches(plan),
        *_on_empty_batches(plan),
        *_on_files(plan),
        *_on_decoding(plan),
        *(note for dataset in plan.source.datasets for note in _on_chunks(dataset)),
    ]


def show_ranks(groups: Iterable[RankGroup]) -> str:
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
        parts = [replica_slice(batch, ranks, rank) for rank in range(ranks)]
        sizes = [part.stop - part.start for part in parts]
        shown = ", ".join(map(str, sizes))
        if ranks > _LISTED_RANKS:
            shown = f"{min(sizes):,} to {max(sizes):,}"
        yield f"batch {batch:,} gives {ranks:,} ranks {shown} rows; use {advice}"
    else:
        each = -(-batch // ranks)
        yield (
            f"batch {batch:,} does not divide by {ranks:,} ranks, so that each takes "
            f"{each:,} rows, {each * ranks:,} in all; use {advice}"
        )


def _on_empty_batches(plan: InputPlan) -> Iterator[str]:
    steps, last = plan.steps.steps, plan.steps.rows_in_last
    never = [group for group in plan.groups if steps and not group.rows]
    if never:
        yield f"there are no rows at all for {_count(never)} ({show_ranks(never)})"
    at_end = [g for g in plan.groups if g.rows and not g.rows_in_last_step]
    if at_end and is_global(plan.request.policy):
        yield (
            f"the last step's {last:,} rows leave none for {_count(at_end)} "
            f"({show_ranks(at_end)}); --drop-remainder leaves that step out"
        )


def _count(groups: Iterable[RankGroup]) -> str:
    count = sum(group.count for group in groups)
    return f"{count:,} rank{'s' if count > 1 else ''}"


def _on_files(plan: InputPlan) -> Iterator[str]:
    source, steps = plan.source, plan.steps
    if source.other_datasets:
        others = ", ".join(source.other_datasets[:_LISTED_RANKS])
        more = ", ..." if len(source.other_datasets) > _LISTED_RANKS else ""
        yield f"not read, as they were not named by --datasets: {others}{more}"
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
    """Yield how often chunks are decoded, where they do not all stay in memory."""
    source, order = plan.source, plan.order
    if source.chunk_bytes <= order.kept_bytes or not source.chunks:
        return
    times = plan.reads.decoded_chunks / source.chunks
    if plan.request.policy is AutoShardPolicy.OFF:
        times /= plan.request.ranks
    if times < _OFTEN:
        return
    each = max(group.rows_per_step for group in plan.groups)
    if order.kind == "permutation":
        cause = "rows come from all chunks at once"
        advice = "leave --window-chunks 0 out"
    elif order.kind == "blocks":
        cause = f"{order.lanes:,} lanes begin and end within chunks"
        advice = "smaller chunks, or batches, would be better"
        if each % (order.lane_rows or 1):
            whole = LANE_ROWS[-1] * plan.request.ranks
            cause = f"ranks share lanes, of {order.lane_rows} rows of a batch"
            advice = f"a batch of {whole:,} rows, or a multiple, gives ranks their own"
    else:
        cause = f"a rank's {each:,} rows of a batch are parts of chunks"
        advice = "--shuffle gives ranks chunks of their own"
        if source.files >= plan.request.ranks:
            advice += ", --policy file whole files"
    yield f"chunks are decoded {times:.1f} times each per epoch, as {cause}; {advice}"


def _on_chunks(dataset: DatasetPart) -> Iterator[str]:
    """Yield what is to be said of chunks that are too large or too small."""
    for layout in dataset.layouts:
        if layout.chunk is None or layout.way == ReadMethod.BYTES.value:
            continue
        together = dataset.row_bytes * layout.chunk[0]
        if together > _HUGE_BYTES:
            yield (
                f"{dataset.name}: {layout.chunk[0]:,} rows are decoded together, "
                f"{as_text(together)}, for any one of them; chunks of 1 MiB are better"
            )
        if layout.chunk_bytes < _TINY_BYTES and layout.chunks > _MANY_CHUNKS:
            yield (
                f"{dataset.name}: {layout.chunks:,} chunks have only "
                f"{as_text(layout.chunk_bytes)} each; chunks of 1 MiB are better"
            )
