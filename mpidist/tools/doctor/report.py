"""The doctor's table, for people and for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from mpidist._version import __version__
from mpidist.tools.doctor.finding import Finding, Status, worst

__all__ = ["to_json", "to_text"]

_WIDTH = 88
_NAME_WIDTH = 28


def to_text(findings: Sequence[Finding]) -> str:
    """Return a table of lines: status, what, found, and the remedy below."""
    rows = [finding._replace(what=_printable(finding.what)) for finding in findings]
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
        f"{sum(finding.status == status for finding in findings)} {status.name}"
        for status in Status
    ]
    return "\n".join([*lines, ", ".join(counts)])


def to_json(findings: Sequence[Finding], ranks: int | None) -> str:
    """Return one JSON object; `ranks` is None where MPI has not said how many."""
    report = {
        "mpidist": __version__,
        "ranks": ranks,
        "status": worst(findings).name,
        "findings": [
            {**finding._asdict(), "status": finding.status.name} for finding in findings
        ],
    }
    return json.dumps(report, indent=1)


def _wrap(first: str, others: str, text: str) -> list[str]:
    """Return lines that begin with `first`, and then with `others`."""
    return textwrap.wrap(
        _printable(text), _WIDTH, initial_indent=first, subsequent_indent=others
    ) or [first.rstrip()]


def _printable(text: str) -> str:
    """Return text without what a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
