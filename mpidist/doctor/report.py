"""The doctor's table, for people and for programs."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence

from mpidist._version import __version__
from mpidist.doctor.finding import Finding, Status, worst

__all__ = ["to_json", "to_text"]

_WIDTH = 88


def to_text(findings: Sequence[Finding]) -> str:
    """Return a table of lines: status, what, found, and the remedy below."""
    name_width = max(len(finding.what) for finding in findings)
    left = " " * (6 + name_width + 2)
    lines = []
    for status, what, found, remedy in findings:
        head = f"{status.name:4}  {what:{name_width}}  "
        lines += textwrap.wrap(
            _printable(found) or "-",
            _WIDTH,
            initial_indent=head,
            subsequent_indent=left,
        )
        if remedy:
            lines += textwrap.wrap(
                _printable(remedy),
                _WIDTH,
                initial_indent=f"{left}-> ",
                subsequent_indent=f"{left}   ",
            )
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


def _printable(text: str) -> str:
    """Return text without what a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
