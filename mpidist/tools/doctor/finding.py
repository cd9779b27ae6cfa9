"""What the doctor finds: rows of its table, and the ranks that they are about."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

__all__ = [
    "Failure",
    "Finding",
    "Status",
    "all_same",
    "by_rank",
    "describe_error",
    "name_each",
    "name_ranks",
    "worst",
]

_SHOWN_VALUES = 6


class Status(enum.IntEnum):
    """How bad it is: jobs run as they should, or worse than they could, or not."""

    OK = 0
    WARN = 1
    FAIL = 2


class Finding(NamedTuple):
    """A row of the table.

    Args:
      status: how bad it is.
      what: was looked at.
      found: what there is.
      remedy: what to do; empty if nothing.
    """

    status: Status
    what: str
    found: str
    remedy: str = ""


class Failure(NamedTuple):
    """Stands where a check's facts should: why it has none."""

    text: str


def worst(findings: Iterable[Finding]) -> Status:
    """Return the status of all together."""
    return max((finding.status for finding in findings), default=Status.OK)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 1" or "ranks 0-3, 6"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{a}-{b}" if a < b else str(a) for a, b in spans]
    is_one = len(texts) == 1 and "-" not in texts[0]
    shown = ", ".join(texts[:_SHOWN_VALUES])
    return f"rank{'' if is_one else 's'} {shown}{' ...' * (len(texts) > _SHOWN_VALUES)}"


def by_rank(values: Mapping[int, Any]) -> str:
    """Return a value that all have as it is, and others with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(str(value), []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    texts = [f"{name_ranks(found)}: {text}" for text, found in ranks.items()]
    more = f"; and {len(texts) - _SHOWN_VALUES} more" * (len(texts) > _SHOWN_VALUES)
    return "; ".join(texts[:_SHOWN_VALUES]) + more


def name_each(values: Mapping[int, Any]) -> str:
    """Return values with the ranks that have them, also where they are the same."""
    if len({str(value) for value in values.values()}) > 1:
        return by_rank(values)
    return f"{name_ranks(values)}: {next(iter(values.values()))}"


def all_same(
    what: str, values: Mapping[int, Any], remedy: str, status: Status = Status.FAIL
) -> Finding:
    """Return a row that is OK if all ranks have the same value."""
    if len({str(value) for value in values.values()}) <= 1:
        return Finding(Status.OK, what, by_rank(values))
    return Finding(status, what, by_rank(values), remedy)


def describe_error(error: BaseException) -> str:
    """Return an exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
