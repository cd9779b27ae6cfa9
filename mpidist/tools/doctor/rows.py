"""Rows of the doctor's table: what checks return, as text and as JSON."""

from __future__ import annotations

import enum
import json
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpidist._version import __version__
from mpidist.util.representation import printable

_WIDTH = 88
_NAME_WIDTH = 28
_SHOWN_VALUES = 6


class Status(enum.IntEnum):
    """Severity: jobs run well; they run, but slower or less safely; they fail."""

    OK = 0
    WARN = 1
    FAIL = 2


OK, WARN, FAIL = Status


class Row(NamedTuple):
    """What a check found on one rank, or on all, and what to do about it."""

    status: Status
    found: str
    remedy: str = ""
    what: str = ""  # the subject
    unlike: Status = OK  # the status, and `remedy` its remedy, if ranks find different


class Failure(str):
    """The reason why a check returned nothing; takes the place of its result."""


def as_rows(what: str, result: Any) -> list[Row]:
    """Return the result of a check as rows: a Failure, a Row or a list of them."""
    if isinstance(result, Failure):
        remedy = "jobs would fail in the same way; run this check alone for details"
        result = Row(FAIL, result, remedy)
    rows = [result] if isinstance(result, Row) else result
    return [row if row.what else row._replace(what=what) for row in rows]


def examine(what: str, check: Callable[..., Any], *arguments: Any) -> list[Row]:
    """Return the rows of a check; one that fails if the check raises."""
    try:
        return as_rows(what, check(*arguments))
    except Exception as error:
        text = f"the check itself failed: {describe_error(error)}"
        return [Row(FAIL, text, "please report this", what)]


def merge(everyone: Mapping[int, Sequence[Row]]) -> list[Row]:
    """Return one row for each subject from the rows of each rank."""
    subjects: dict[str, dict[int, Row]] = {}
    for rank, rows in everyone.items():
        for row in rows:
            subjects.setdefault(row.what, {})[rank] = row
    return [_merge_one(rows, everyone) for rows in subjects.values()]


def _merge_one(rows: Mapping[int, Row], everyone: Collection[int]) -> Row:
    status, first = worst(rows.values()), max(rows.values(), key=lambda r: r.status)
    texts = {rank: row.found for rank, row in rows.items() if row.status is status}
    asked: Collection[int] = () if status is OK else everyone
    if status is OK and len(set(texts.values())) > 1:
        status = first.unlike
    remedy = "" if status is OK else first.remedy
    return Row(status, by_rank(texts, asked), remedy, first.what)


def worst(rows: Iterable[Row]) -> Status:
    """Return the most severe status."""
    return max((row.status for row in rows), default=OK)


def name_ranks(ranks: Iterable[int], noun: str = "rank") -> str:
    """Return "rank 1" or "ranks 0-3, 6"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    texts = [f"{a}-{b}" if a < b else str(a) for a, b in spans]
    plural = "" if len(texts) == 1 and "-" not in texts[0] else "s"
    more = " ..." * (len(texts) > _SHOWN_VALUES)
    return f"{noun}{plural} {', '.join(texts[:_SHOWN_VALUES])}{more}"


def by_rank(values: Mapping[int, Any], asked: Collection[int] = ()) -> str:
    """Return a common value alone, and others with their ranks.

    Args:
      values: by rank.
      asked: the ranks that were asked. A common value of only some has their names.
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(str(value), []).append(rank)
    if len(ranks) == 1 and len(asked) <= len(values):
        return next(iter(ranks))
    texts = [f"{name_ranks(having)}: {text}" for text, having in ranks.items()]
    more = f"; and {len(texts) - _SHOWN_VALUES} more" * (len(texts) > _SHOWN_VALUES)
    return "; ".join(texts[:_SHOWN_VALUES]) + more


def describe_error(error: BaseException) -> str:
    """Return an exception as one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _without_needless(rows: Iterable[Row]) -> list[Row]:
    return [row if row.status else row._replace(remedy="") for row in rows]


def to_text(rows: Sequence[Row]) -> str:
    """Return a table: status, subject, observation, and the remedy below."""
    rows = _without_needless(rows)
    names = [printable(row.what) for row in rows]
    name_width = min(max(map(len, names)), _NAME_WIDTH)
    left = " " * (6 + name_width + 2)
    lines = []
    for (status, found, remedy, *_), name in zip(rows, names, strict=True):
        head = f"{status.name:4}  {name:{name_width}}  "
        if len(name) > name_width:
            lines.append(head.rstrip())
            head = left
        lines += _wrap(head, left, found or "-")
        if remedy:
            lines += _wrap(f"{left}-> ", f"{left}   ", remedy)
    counts = [f"{sum(row.status is s for row in rows)} {s.name}" for s in Status]
    return "\n".join([*lines, ", ".join(counts)])


def _wrap(first: str, others: str, text: str) -> list[str]:
    """Wrap text with `first` before the first line, and `others` before the rest."""
    return textwrap.wrap(
        printable(text), _WIDTH, initial_indent=first, subsequent_indent=others
    ) or [first.rstrip()]


def to_json(rows: Sequence[Row], ranks: int | None) -> str:
    """Return one JSON object; `ranks` is None if MPI did not start."""
    findings = [
        {"status": status.name, "what": what, "found": found, "remedy": remedy}
        for status, found, remedy, what, _ in _without_needless(rows)
    ]
    report = {"mpidist": __version__, "ranks": ranks, "status": worst(rows).name}
    return json.dumps({**report, "findings": findings}, indent=1)
