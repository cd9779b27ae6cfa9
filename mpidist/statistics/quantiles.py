"""Quantiles of the numbers of all ranks, with a sketch of bounded error.

The sketch is DDSketch (C. Masson, J. Rim, H. Lee: DDSketch: a fast and fully-mergeable
quantile sketch with relative-error guarantees, PVLDB 12, 2019): it counts numbers in
bins with logarithmic bounds. Counts are exact integers, so the result is the same on
any number of ranks.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.errors import ArgumentError, UnsupportedError
from mpidist.statistics.statistic import Statistic, host_rows
from mpidist.util import validation

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

# Counts of numbers without logarithm: -inf, 0, inf, nan
_BELOW, _ZERO, _ABOVE, _NAN = range(4)
# Smaller magnitudes count as 0, larger ones as infinite
_LEAST, _MOST = 2.0**-1000, 2.0**1000


class Quantiles(Statistic):
    """Quantiles of numbers, each within a relative error of the exact one.

    The exact quantile of n numbers is `numpy.quantile(..., method="lower")`: number
    floor(q * (n - 1)) in sorted order. Magnitudes below 2**-1000 count as 0,
    above 2**1000 as infinite. Needs `pip install ddsketch`.

    Args:
      relative_error: of the results, between 1e-4 and 0.5. A bin takes 16 bytes; with
        0.01 numbers from 1e-6 to 1e6 need 1,400 bins.
      strategy: see `Statistic`.

    Raises:
      ArgumentError: `relative_error` is out of range.
      UnsupportedError: ddsketch is not installed.

    Example:
      >>> latency = mpidist.statistics.Quantiles(strategy=strategy)
      >>> latency.update_state(np.arange(1.0, 101.0))  # on both replicas
      >>> print(latency.result([0.5, 0.99]).round())
      [50. 99.]
    """

    def __init__(self, relative_error: float = 0.01, strategy: Strategy | None = None):
        self._error = validation.number("relative_error", relative_error, "> 0")
        if not 1e-4 <= self._error <= 0.5:
            raise ArgumentError(
                f"relative_error must be between 1e-4 and 0.5, not {self._error:g}"
            )
        _ddsketch()
        super().__init__(strategy)

    def reset_state(self) -> None:
        """Remove the rows that this rank has added. Not collective."""
        self._others = np.zeros(4, np.int64)
        # Counts by sign, from bin `_first` on
        self._first, self._counts = 0, np.zeros((2, 0), np.int64)

    def update_state(self, rows: Any) -> None:
        """Add numbers of this rank, of any shape except (). Not collective.

        Raises: ArgumentError, ArgumentTypeError: see `Moments.update_state`.
        """
        numbers = host_rows(rows).ravel().astype(np.float64)
        sizes = np.abs(numbers)
        is_in_bin = (sizes >= _LEAST) & (sizes <= _MOST)
        self._others += [
            (numbers < -_MOST).sum(),
            (sizes < _LEAST).sum(),
            (numbers > _MOST).sum(),
            np.isnan(numbers).sum(),
        ]
        sizes, is_negative = sizes[is_in_bin], numbers[is_in_bin] < 0
        if len(sizes):
            bins = self._bins_of(sizes)
            self._reach(int(bins.min()), int(bins.max()) + 1)
            bins -= self._first
            length = self._counts.shape[1]
            self._counts[0] += np.bincount(bins[is_negative], minlength=length)
            self._counts[1] += np.bincount(bins[~is_negative], minlength=length)

    def _bins_of(self, sizes: Any) -> Any:
        """Return the bin of each number: bin k includes its upper bound, gamma**k."""
        first, edges = _edges(self._error)
        unit = math.log2((1 + self._error) / (1 - self._error))
        found = np.ceil(np.log2(sizes) / unit).astype(np.int64) - first
        found = np.clip(found, 1, len(edges) - 1)
        # The logarithm may be off by a bit, and not always by the same
        found += sizes > edges[found]
        found -= sizes <= edges[found - 1]
        return found + first

    def _reach(self, first: int, end: int) -> None:
        """Have counts of all bins from `first` to `end`."""
        length = self._counts.shape[1]
        if not length:
            self._first = first
        before = max(0, self._first - first)
        after = max(0, end - (self._first + length))
        self._counts = np.pad(self._counts, ((0, 0), (before, after)))
        self._first -= before

    def result(self, q: float | Sequence[float] = 0.5) -> Any:
        """Return quantiles of the numbers that all ranks have added. Collective.

        Args:
          q: numbers between 0 and 1, equal on all ranks.

        Returns:
          float64 of the shape of `q`: nan without numbers, or if a number is nan.

        Raises, on all ranks:
          ArgumentError: a q that is not between 0 and 1.
          MismatchError: see `Statistic.result`.
        """

        def check() -> Any:
            try:
                wanted = np.asarray(q, np.float64)
            except (TypeError, ValueError):
                wanted = np.array(np.nan)
            if not ((wanted >= 0) & (wanted <= 1)).all():
                what = validation.shown(q)
                raise ArgumentError(f"q must be between 0 and 1, not {what}")
            return wanted

        consensus = self.distribute_strategy.extended.consensus
        wanted = consensus.run("Quantiles.result", check)
        whole = self._of_all_ranks()
        sketch = whole._describe()
        found = [whole._quantile(sketch, one) for one in wanted.ravel().tolist()]
        return np.array(found).reshape(wanted.shape)[()]

    def _quantile(self, sketch: Any, q: float) -> float:
        below, above = int(self._others[_BELOW]), int(self._others[_ABOVE])
        finite = int(sketch.count)
        if self._others[_NAN] or not below + finite + above:
            return math.nan
        rank = math.floor(q * (below + finite + above - 1)) - below
        if not 0 <= rank < finite:
            return -math.inf if rank < 0 else math.inf
        # Half a rank on, as its ranks are numbers that may be rounded
        share = min(1.0, (rank + 0.5) / max(1, finite - 1)) if rank else 0.0
        return float(sketch.get_quantile_value(share))

    def _describe(self) -> Any:
        """Return a sketch of ddsketch's."""
        sketch = _ddsketch().DDSketch(self._error)
        unit = math.log2((1 + self._error) / (1 - self._error))
        for sign, counts in zip((-1, 1), self._counts, strict=True):
            for place in np.flatnonzero(counts).tolist():
                # The middle of the bin, which ddsketch finds in this bin for certain
                middle = 2.0 ** ((self._first + place - 0.5) * unit)
                sketch.add(sign * middle, float(counts[place]))
        if self._others[_ZERO]:
            sketch.add(0.0, float(self._others[_ZERO]))
        return sketch

    def _settings(self) -> str:
        return f"relative_error={self._error}"

    def _rows_kind(self) -> str:
        return "numbers" if self._counts.size else ""

    def _shown_rows(self) -> str:
        return f"{self._counts.sum() + self._others.sum()} numbers"

    def _extent(self) -> list[int]:
        return [self._first, self._first + self._counts.shape[1]]

    def _of_all_ranks(self) -> Quantiles:
        _, least, most = self._compare()
        whole, mine = (
            Quantiles(self._error, self.distribute_strategy) for _ in range(2)
        )
        mine._add(self)
        if least:
            mine._reach(least[0], most[1])
            whole._first = least[0]
        total = {"counts": mine._counts, "others": mine._others}
        total = self._all_reduce("SUM", total)
        whole._counts, whole._others = total["counts"], total["others"]
        return whole

    def _add(self, other: Quantiles) -> None:
        self._others += other._others
        length = other._counts.shape[1]
        if length:
            self._reach(other._first, other._first + length)
            begin = other._first - self._first
            self._counts[:, begin : begin + length] += other._counts

    def _to_state(self) -> dict[str, Any]:
        return {
            "kind": "Quantiles",
            "settings": self._settings(),
            "first": self._first,
            "counts": self._counts,
            "others": self._others,
        }

    def _from_state(self, state: Mapping[str, Any]) -> None:
        self._first = int(state["first"])
        self._counts = np.array(state["counts"])
        self._others = np.array(state["others"])


@functools.lru_cache(maxsize=4)
def _edges(error: float) -> tuple[int, Any]:
    """Return the number of the first bin, and the upper bounds of all bins."""
    unit = math.log2((1 + error) / (1 - error))
    first, last = math.floor(-1001 / unit), math.ceil(1001 / unit)
    return first, np.exp2(np.arange(first, last + 1) * unit)


def _ddsketch() -> Any:
    """Return the package ddsketch.

    Raises: UnsupportedError: it is not installed.
    """
    try:
        return importlib.import_module("ddsketch")
    except ImportError as error:
        raise UnsupportedError(
            "Quantiles needs the package ddsketch: pip install ddsketch"
        ) from error
