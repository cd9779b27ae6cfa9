"""A distributed dataset in one line."""

from __future__ import annotations

from mpidist.data.distributed.feed import Plan
from mpidist.data.pipeline import Pipeline

__all__ = ["summarize"]


def summarize(plan: Plan) -> str:
    """Return how much there is, and who gets what. Not collective; looks at no data."""
    parts, pipeline = [], plan.pipeline
    if isinstance(pipeline, Pipeline):
        if pipeline.file_count:
            parts.append(_count(pipeline.file_count, "HDF5 file"))
        parts.append(_count(sum(map(len, pipeline.sources)), "row"))
    steps = plan.cardinality
    parts.append(_count(steps, "step") if steps >= 0 else "steps without a known end")
    rows, replicas = pipeline.batch_size, plan.extended.num_replicas
    if not plan.is_global:
        parts.append("as replica 0 sees it: each reads its own")
    elif rows is None:
        parts.append(f"each divided over {replicas} replicas")
    else:
        share = -(-rows // replicas)
        parts.append(f"{_count(rows, 'row')} in each, {share:,} for a replica")
    return ", ".join(parts)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"
