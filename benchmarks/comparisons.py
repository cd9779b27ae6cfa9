"""What was measured beside another way, and beside a target. Needs no MPI."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

__all__ = ["TABLE_HEAD", "Comparison"]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What we need, or give, beside what another way needs, or gives.

    Args:
      case: what is done.
      against: what ours is divided by.
      unit: of `ours` and `theirs`, one number per repetition.
      target: what the ratio has to reach; None where it is only told.
      is_at_least: whether the ratio has to be at least the target, or at most.
      note: what else there is to say.
    """

    case: str
    against: str
    unit: str
    ours: list[float]
    theirs: list[float]
    target: float | None = None
    is_at_least: bool = True
    note: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours by theirs in each repetition."""
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of all repetitions."""
        return statistics.median(self.ratios)

    @property
    def is_reached(self) -> bool | None:
        """Whether the ratio is what it has to be."""
        if self.target is None:
            return None
        if self.is_at_least:
            return self.ratio >= self.target
        return self.ratio <= self.target

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for a JSON file."""
        return dataclasses.asdict(self) | {
            "ours_median": statistics.median(self.ours),
            "theirs_median": statistics.median(self.theirs),
            "ratio": self.ratio,
            "ratio_lowest": min(self.ratios),
            "ratio_highest": max(self.ratios),
            "is_reached": self.is_reached,
        }

    def line(self) -> str:
        """Return a line of the table."""
        sign = ">=" if self.is_at_least else "<="
        target = "" if self.target is None else f"{sign} {self.target:g}"
        words = {True: "reached", False: "missed", None: ""}
        ours, theirs = map(statistics.median, (self.ours, self.theirs))
        return (
            f"{self.case:32} {self.against:44} {_short(ours):>8} {_short(theirs):>8} "
            f"{self.unit:10} {self.ratio:8.3g} {target:>7} {words[self.is_reached]}"
        )


TABLE_HEAD = (
    f"{'case':32} {'against':44} {'ours':>8} {'theirs':>8} {'':10} "
    f"{'ratio':>8} {'target':>7}"
)


def _short(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
