"""Quantiles of the numbers of all ranks, with a sketch of bounded error.

The sketch is DDSketch (C. Masson, J. Rim, H. Lee: DDSketch: a fast and fully-mergeable
quantile sketch with relative-error guarantees, PVLDB 12, 2019): it counts numbers in
bins with logarithmic bounds. Counts are exact integers, so the result is the same on
any number of ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.errors import ArgumentError
from mpidist.statistics.statistic import Statistic, host_rows, row_shape
from mpidist.util import validation

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

# Counts of numbers without logarithm: -inf, 0, inf, nan
_BELOW, _ZERO, _ABOVE, _NAN = range(4)
# Smaller magnitudes count as 0, larger ones as infinite
_LEAST, _MOST = 2.0**-1000, 2.0**1000
_NO_BINS = 1 << 30  # more than the number of any bin


class Quantiles(Statistic):
    """Quantiles of numbers, each within a relative error of the exact one.

    The exact quantile of n numbers is `numpy.quantile(..., method="lower")`: number
    floor(q * (n - 1)) in sorted order. Magnitudes below 2**-1000 count as 0,
    above 2**1000 as infinite.

    Args:
      relative_error: of the results, between 1e-4 and 0.5. A bin takes 16 bytes; with
        0.01 numbers from 1e-6 to 1e6 need 1,400 bins, and those from 200 to 320 need
        24.
      strategy: see `Statistic`.
      axis: None for the quantiles of all numbers; 0 for one in each place of a row,
        such as each cell of a map. Then each place has all bins.
      skip_nan: whether nan is left out, as by `numpy.nanquantile`.

    Raises:
      ArgumentError: `relative_error` is out of range; another axis.

    Example:
      >>> latency = mpidist.statistics.Quantiles(strategy=strategy)
      >>> latency.update_state(np.arange(1.0, 101.0))  # on both replicas
      >>> print(latency.result([0.5, 0.99]).round())
      [50. 99.]
    """

    def __init__(
        self,
        relative_error: float = 0.01,
        strategy: Strategy | None = None,
        *,
        axis: int | None = None,
        skip_nan: bool = False,
    ):
        self._error = validation.number("relative_error", relative_error, "> 0")
        if not 1e-4 <= self._error <= 0.5:
            raise ArgumentError(
                f"relative_error must be between 1e-4 and 0.5, not {self._error:g}"
            )
        self._axis = validation.optional_integer("axis", axis, 0, most=0)
        self._skip_nan = validation.switch("skip_nan", skip_nan)
        super().__init__(strategy)

    def reset_state(self) -> None:
        """Remove the rows that this rank has added. Not collective."""
        self._begin(() if self._axis is None else None)

    def _begin(self, shape: tuple[int, ...] | None) -> None:
        """Have no numbers; `shape` is that of a row, None if it is unknown."""
        self._shape, columns = shape, math.prod(shape or ())
        self._others = np.zeros((4, columns), np.int64)
        # Counts by sign, from bin `_first` on, and by place
        self._first, self._counts = 0, np.zeros((2, 0, columns), np.int64)

    def update_state(self, rows: Any) -> None:
        """Add numbers of this rank, of any shape except (). Not collective.

        Raises: ArgumentError, ArgumentTypeError: see `Moments.update_state`.
        """
        if isinstance(rows, list) and not rows:
            return  # of no shape
        numbers = host_rows(rows).astype(np.float64)
        if self._axis is None:
            numbers = numbers.reshape(-1)
        elif self._shape is None:
            self._begin(numbers.shape[1:])
        elif self._shape != numbers.shape[1:]:
            raise ArgumentError(
                f"rows have shape {list(numbers.shape[1:])}, but earlier rows had "
                f"{list(self._shape)}"
            )
        numbers = numbers.reshape(len(numbers), math.prod(numbers.shape[1:]))
        sizes = np.abs(numbers)
        is_in_bin = (sizes >= _LEAST) & (sizes <= _MOST)
        self._others += [
            (numbers < -_MOST).sum(axis=0),
            (sizes < _LEAST).sum(axis=0),
            (numbers > _MOST).sum(axis=0),
            np.isnan(numbers).sum(axis=0),
        ]
        sizes, signs = sizes[is_in_bin], (numbers[is_in_bin] > 0).astype(np.int64)
        if len(sizes):
            bins = self._bins_of(sizes)
            self._reach(int(bins.min()), int(bins.max()) + 1)
            places = np.nonzero(is_in_bin)[1]
            np.add.at(self._counts, (signs, bins - self._first, places), 1)

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
        length = self._counts.shape[1]
        if not length:
            self._first = first
        before = max(0, self._first - first)
        after = max(0, end - (self._first + length))
        if before or after:
            self._counts = np.pad(self._counts, ((0, 0), (before, after), (0, 0)))
            self._first -= before

    def result(self, q: float | Sequence[float] = 0.5) -> Any:
        """Return quantiles of the numbers that all ranks have added. Collective.

        Args:
          q: numbers between 0 and 1, equal on all ranks.

        Returns:
          float64 of the shape of `q`, or of `q` and a row with `axis=0`: nan without
          numbers, or if a number is nan (unless it is skipped).

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
        values, up_to = whole._describe()
        found = [whole._quantile(values, up_to, one) for one in wanted.ravel().tolist()]
        return np.array(found).reshape((*wanted.shape, *(whole._shape or ())))[()]

    def _quantile(self, values: Any, up_to: Any, q: float) -> Any:
        total = up_to[-1]
        rank = np.floor(q * np.maximum(total - 1, 0)).astype(np.int64)
        found = values[np.minimum((up_to <= rank).sum(axis=0), len(values) - 1)]
        is_nan = total == 0
        if not self._skip_nan:
            is_nan |= self._others[_NAN] > 0
        return np.where(is_nan, np.nan, found)

    def _describe(self) -> Any:
        """Return ascending values, and how many numbers are at most each of them."""
        first, edges = _edges(self._error)
        begin = self._first - first
        # In the middle of a bin: no number in it differs by more than the error
        middle = 2 / (1 + (1 + self._error) / (1 - self._error))
        middles = edges[begin : begin + self._counts.shape[1]] * middle
        values = np.concatenate([[-np.inf], -middles[::-1], [0], middles, [np.inf]])
        below, zero, above = (self._others[i : i + 1] for i in (_BELOW, _ZERO, _ABOVE))
        negative, positive = self._counts
        counts = np.concatenate([below, negative[::-1], zero, positive, above])
        return values, counts.cumsum(axis=0, out=counts)

    def _settings(self) -> str:
        axis = "" if self._axis is None else f", axis={self._axis}"
        return f"relative_error={self._error}{axis}" + self._skip_nan * ", skip_nan"

    def _rows_kind(self) -> str:
        if self._axis is None:
            return "numbers" if self._counts.size else ""
        return "" if self._shape is None else f"numbers{list(self._shape)}"

    def _shown_rows(self) -> str:
        return f"{self._counts.sum() + self._others.sum()} numbers"

    def _extent(self) -> list[int]:
        length = self._counts.shape[1]
        return [self._first, self._first + length] if length else [_NO_BINS, -_NO_BINS]

    def _like(self, shape: tuple[int, ...] | None) -> Quantiles:
        options: Any = {"axis": self._axis, "skip_nan": self._skip_nan}
        made = Quantiles(self._error, self.distribute_strategy, **options)
        made._begin(shape)
        return made

    def _of_all_ranks(self) -> Quantiles:
        kind, least, most = self._compare()
        shape = () if self._axis is None else row_shape(kind) if kind else None
        whole, mine = self._like(shape), self._like(shape)
        mine._add(self)
        if least and least[0] < most[1]:
            mine._reach(least[0], most[1])
            whole._first = least[0]
        total = {"counts": mine._counts, "others": mine._others}
        total = self._all_reduce("SUM", total)
        whole._counts, whole._others = total["counts"], total["others"]
        return whole

    def _add(self, other: Quantiles) -> None:
        if other._shape is None:
            return
        if self._shape is None:
            self._begin(other._shape)
        self._others += other._others
        length = other._counts.shape[1]
        if length:
            self._reach(other._first, other._first + length)
            begin = other._first - self._first
            self._counts[:, begin : begin + length] += other._counts

    def _to_state(self) -> dict[str, Any]:
        state = {"kind": "Quantiles", "settings": self._settings()}
        if self._shape is None:
            return state
        shape = list(self._shape)
        return state | {
            "first": self._first,
            "counts": self._counts.reshape(*self._counts.shape[:2], *shape),
            "others": self._others.reshape(4, *shape),
        }

    def _from_state(self, state: Mapping[str, Any]) -> None:
        if "first" not in state:
            return
        others, counts = np.array(state["others"]), np.array(state["counts"])
        self._begin(others.shape[1:])
        self._first, self._others = int(state["first"]), others.reshape(4, -1)
        self._counts = counts.reshape(*counts.shape[:2], self._others.shape[1])


@functools.lru_cache(maxsize=4)
def _edges(error: float) -> tuple[int, Any]:
    unit = math.log2((1 + error) / (1 - error))
    first, last = math.floor(-1001 / unit), math.ceil(1001 / unit)
    return first, np.exp2(np.arange(first, last + 1) * unit)
