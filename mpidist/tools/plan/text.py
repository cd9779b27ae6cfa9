"""A plan as text for people, and as JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from mpidist.options import AutoShardPolicy
from mpidist.tools.plan.notes import notes_on, show_ranks
from mpidist.tools.plan.parts import (
    DatasetPart,
    InputPlan,
    LayoutPart,
    RankGroup,
)
from mpidist.util.available_memory import as_text

__all__ = ["to_json", "to_text"]

_MOST_LINES = 10
_WIDTH = 80
_HEAD = ("ranks", "rows", "per step", "last step", "empty steps", "files", "reads")


def to_json(plan: InputPlan) -> str:
    """Return all of a plan, and the notes on it."""
    found = dataclasses.asdict(plan)
    found["request"]["policy"] = plan.request.policy.name.lower()
    found["notes"] = notes_on(plan)
    return json.dumps(found, indent=1)


def to_text(plan: InputPlan) -> str:
    """Return a plan in few lines, whatever the number of ranks."""
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
        sizes += f"; {steps.dropped_rows:,} rows are left out"
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
        yield (
            f"nodes: {node.nodes:,} of {_count(node.ranks, 'rank')}; each reads "
            f"{as_text(node.read_bytes)} per epoch, and keeps up to "
            f"{as_text(node.kept_bytes)} of chunks; cache() would keep "
            f"{as_text(plan.source.memory_bytes)}"
        )


def _order(plan: InputPlan) -> str:
    order, request = plan.order, plan.request
    if order.kind == "files":
        return "as the rows lie in the files"
    seed = "drawn by each job" if request.seed is None else str(request.seed)
    whose = " of a rank's files" if request.policy is AutoShardPolicy.FILE else ""
    if order.kind == "permutation":
        return f"exact permutation of all rows{whose}, seed {seed}"
    lanes = f" in each of {order.lanes:,} lanes" if (order.lanes or 1) > 1 else ""
    return (
        f"blocks of {_count(order.block_rows or 0, 'row')}{whose} in random order, "
        f"{order.window_blocks:,} at a time mixed{lanes}, seed {seed}"
    )


def _reads(plan: InputPlan) -> str:
    reads, ranks = plan.reads, plan.request.ranks
    parts = [f"{as_text(reads.read_bytes)} per epoch by all ranks"]
    if plan.source.chunks:
        times = reads.decoded_chunks / plan.source.chunks
        parts.append(
            f"{_count(plan.source.chunks, 'chunk')} decoded {times:,.2f} times, up to "
            f"{as_text(plan.order.kept_bytes)} kept by each rank"
        )
    if not reads.is_exact:
        sample = f" from {reads.counted_ranks:,} of {ranks:,} ranks"
        parts.append(f"estimated{sample if reads.counted_ranks < ranks else ''}")
    return "; ".join(parts)


def _table(plan: InputPlan) -> Iterator[str]:
    """Yield a line for each group of ranks; several groups share one if need be."""
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
    ranks = show_ranks(groups)
    if len(groups) > 1:
        ranks = f"{sum(group.count for group in groups):,} ranks"
    about = "" if plan.reads.is_exact else "~"
    most = "" if plan.reads.are_files_counted else "<="
    read_bytes = sum(group.read_bytes * group.count for group in groups)
    return (
        ranks,
        _span([group.rows for group in groups]),
        _span([group.rows_per_step for group in groups]),
        _span([group.rows_in_last_step for group in groups]),
        _span([group.empty_steps for group in groups]),
        most + _span([group.files for group in groups]),
        about + as_text(read_bytes / sum(group.count for group in groups)),
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _plain(number: float) -> str:
    return f"{number:,.1f}".removesuffix(".0")


def _span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,}..{high:,}"
