"""Check results: the rows of the doctor's table, as text and as JSON."""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpidist._version import __version__

__all__ = [
    "CheckResult",
    "Failure",
    "Status",
    "all_same",
    "by_rank",
    "describe_error",
    "name_each",
    "name_ranks",
    "to_json",
    "to_text",
    "worst",
]

_WIDTH = 88
_NAME_WIDTH = 28
_SHOWN_VALUES = 6


class Status(enum.IntEnum):
    """Severity: jobs run well; they run, but slower or less safely; they fail."""

    OK = 0
    WARN = 1
    FAIL = 2


class CheckResult(NamedTuple):
    """A row of the table.

    Args:
      status: severity.
      what: the subject of the check.
      found: the observation.
      remedy: what to do; empty if nothing.
    """

    status: Status
    what: str
    found: str
    remedy: str = ""


class Failure(NamedTuple):
    """The reason why a check returned no facts; takes their place."""

    text: str


def worst(results: Iterable[CheckResult]) -> Status:
    """Return the most severe status."""
    return max((result.status for result in results), default=Status.OK)


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
    """Return a common value alone, and differing values with their ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(str(value), []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    texts = [f"{name_ranks(found)}: {text}" for text, found in ranks.items()]
    more = f"; and {len(texts) - _SHOWN_VALUES} more" * (len(texts) > _SHOWN_VALUES)
    return "; ".join(texts[:_SHOWN_VALUES]) + more


def name_each(values: Mapping[int, Any]) -> str:
    """Return values with their ranks, also if there is only one value."""
    if len({str(value) for value in values.values()}) > 1:
        return by_rank(values)
    return f"{name_ranks(values)}: {next(iter(values.values()))}"


def all_same(
    what: str, values: Mapping[int, Any], remedy: str, status: Status = Status.FAIL
) -> CheckResult:
    """Return a row that is OK if all ranks have the same value."""
    if len({str(value) for value in values.values()}) <= 1:
        return CheckResult(Status.OK, what, by_rank(values))
    return CheckResult(status, what, by_rank(values), remedy)


def describe_error(error: BaseException) -> str:
    """Return an exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def to_text(results: Sequence[CheckResult]) -> str:
    """Return a table: status, subject, observation, and the remedy below."""
    rows = [row._replace(what=_printable(row.what)) for row in results]
    name_width = min(max(len(row.what) for row in rows), _NAME_WIDTH)
    left = " " * (6 + name_width + 2)
    lines = []
    for status, what, found, remedy in rows:
        head = f"{status.name:4}  {what:{name_width}}  "
        if len(what) > name_width:
            lines.append(head.rstrip())
            head = left
        lines += _wrap(head, left, found or "-")
        if remedy:
            lines += _wrap(f"{left}-> ", f"{left}   ", remedy)
    counts = [
        f"{sum(row.status == status for row in results)} {status.name}"
        for status in Status
    ]
    return "\n".join([*lines, ", ".join(counts)])


def to_json(results: Sequence[CheckResult], ranks: int | None) -> str:
    """Return one JSON object; `ranks` is None if MPI did not start."""
    report = {
        "mpidist": __version__,
        "ranks": ranks,
        "status": worst(results).name,
        "findings": [{**row._asdict(), "status": row.status.name} for row in results],
    }
    return json.dumps(report, indent=1)


def _wrap(first: str, others: str, text: str) -> list[str]:
    """Wrap text with `first` before the first line, and `others` before the rest."""
    return textwrap.wrap(
        _printable(text), _WIDTH, initial_indent=first, subsequent_indent=others
    ) or [first.rstrip()]


def _printable(text: str) -> str:
    """Escape control characters, which a terminal would execute."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
