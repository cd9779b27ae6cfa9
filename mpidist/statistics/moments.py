"""Mean, variance, minimum and maximum of each column, rounded once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.comm.consensus.signatures import CallSignature
from mpidist.data.dataset import require_end
from mpidist.data.distributed.datasets import DistributedDataset
from mpidist.errors import ArgumentError
from mpidist.statistics.exact_sums import (
    ExactSums,
    exact_parts,
    exact_squares,
    ratio,
)
from mpidist.statistics.statistic import Statistic, host_rows
from mpidist.util import nest, validation
from mpidist.util.dtypes import accumulator_dtype, digits, dtype_of
from mpidist.values import select_replica

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

_CALL = "statistics_of"
_NAN, _ABOVE, _BELOW = range(3)  # numbers that are not finite


@dataclasses.dataclass(frozen=True)
class Description:
    """The result of `Moments.result`. Arrays have the shape of one row.

    Args:
      count: the number of rows of all ranks.
      mean: float64, the exact mean, rounded once. As in NumPy, nan if a number is nan,
        inf if one is inf; nan without rows.
      variance: float64, rounded once; nan if a number is not finite.
      std: the square root of the variance.
      minimum: in the dtype of the rows; nan if a number is nan, or without rows. A zero
        has no sign.
      maximum: likewise.

    Example:
      >>> found = strategy.statistics_of(np.array([1.0, 2.0, 3.0]))  # on both replicas
      >>> print(found.count, found.mean, found.minimum, found.maximum)
      6 2.0 1.0 3.0
    """

    count: int
    mean: Any
    variance: Any
    std: Any
    minimum: Any
    maximum: Any


class Moments(Statistic):
    """Mean, variance, minimum and maximum of rows, column by column.

    Sums are exact, so results do not depend on the number of ranks, the order of the
    rows or the batch sizes, and no precision is lost if the mean is much larger than
    the deviation. A block of rows takes about ten times as long as its `numpy.var`.

    Args:
      ddof: the divisor of the variance is the number of rows minus `ddof`, as in NumPy.
      strategy: see `Statistic`.

    Example:
      >>> moments = mpidist.statistics.Moments(strategy=strategy)
      >>> rank = strategy.rank
      >>> moments.update_state(np.array([[1.0, 10.0], [2.0, 20.0]]) + rank)
      >>> found = moments.result()
      >>> found.count, found.mean, found.maximum
      (4, array([ 2. , 15.5]), array([ 3., 21.]))
    """

    def __init__(self, ddof: int = 0, strategy: Strategy | None = None):
        self._ddof = validation.integer("ddof", ddof, 0)
        super().__init__(strategy)

    def reset_state(self) -> None:
        """Remove the rows that this rank has added. Not collective."""
        self._count = 0
        self._dtype: np.dtype[Any] | None = None
        self._shape: tuple[int, ...] = ()
        self._sums = self._squares = ExactSums(0)
        self._others: Any = None  # numbers of nan, inf and -inf in each column
        self._least: Any = None
        self._most: Any = None

    def update_state(self, rows: Any) -> None:
        """Add rows of this rank. Not collective.

        Args:
          rows: numbers of shape (rows, ...), possibly zero rows; an array of NumPy,
            CuPy, PyTorch or JAX of float16, bfloat16, float32, float64, integers or
            bool.

        Raises:
          ArgumentError: earlier rows have a different dtype or shape; a scalar.
          ArgumentTypeError: not numbers.
        """
        if isinstance(rows, list) and not rows:
            return  # of no dtype
        rows = host_rows(rows)
        if self._dtype is None:
            self._begin(rows.dtype, rows.shape[1:])
        elif (rows.dtype, rows.shape[1:]) != (self._dtype, self._shape):
            raise ArgumentError(
                f"rows are {rows.dtype}{list(rows.shape[1:])}, but earlier rows were "
                f"{self._rows_kind()}"
            )
        if not len(rows):
            return
        self._count += len(rows)
        flat = rows.reshape(len(rows), -1)
        flat = flat.view(np.uint8) if flat.dtype == np.bool_ else flat
        if digits(flat.dtype):
            flat = flat.astype(_wide(flat.dtype), copy=False)
            is_finite = np.isfinite(flat)
            if not is_finite.all():
                self._count_others(flat)
                self._widen(flat)
                flat = np.where(is_finite, flat, 0)
                self._add_finite(flat)
                return
        self._widen(flat)
        self._add_finite(flat)

    def _begin(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        columns = math.prod(shape)
        self._sums, self._squares = ExactSums(columns), ExactSums(columns)
        self._others = np.zeros((3, columns), np.int64)
        number = _wide(dtype)
        if digits(number):
            least, most = -np.inf, np.inf
        else:
            least, most = np.iinfo(number).min, np.iinfo(number).max
        self._least = np.full(columns, most, number)
        self._most = np.full(columns, least, number)

    def _widen(self, flat: Any) -> None:
        least, most = flat.min(axis=0), flat.max(axis=0)
        if digits(flat.dtype):
            # Signs of zeros and bits of nan would depend on the order of the rows
            least, most = (
                np.where(np.isnan(each), np.nan, each + 0) for each in (least, most)
            )
        np.minimum(self._least, least, out=self._least)
        np.maximum(self._most, most, out=self._most)

    def _count_others(self, flat: Any) -> None:
        self._others[_NAN] += np.isnan(flat).sum(axis=0)
        self._others[_ABOVE] += (flat == np.inf).sum(axis=0)
        self._others[_BELOW] += (flat == -np.inf).sum(axis=0)

    def _add_finite(self, flat: Any) -> None:
        self._sums.add_rows(exact_parts(flat))
        self._squares.add_rows(exact_squares(flat))

    def _settings(self) -> str:
        return f"ddof={self._ddof}"

    def _rows_kind(self) -> str:
        return "" if self._dtype is None else f"{self._dtype}{list(self._shape)}"

    def _shown_rows(self) -> str:
        return (
            f"{self._count} rows of {self._rows_kind()}" if self._dtype else "no rows"
        )

    def _extent(self) -> list[int]:
        extent = []
        for sums in (self._sums, self._squares):
            extent += [sums.exponent, sums.exponent + sums.bits]
        return extent

    def _of_all_ranks(self) -> Moments:
        kind, least, most = self._compare()
        whole = Moments(self._ddof, self.distribute_strategy)
        if not kind:
            return whole
        dtype, _, shape = kind.partition("[")
        sizes = [int(size) for size in shape[:-1].split(",") if size]
        # A rank without rows does not know their dtype and shape
        whole._begin(dtype_of(dtype), tuple(sizes))
        mine = self if self._dtype is not None else whole
        limbs = []
        for i, sums in ((0, mine._sums), (2, mine._squares)):
            words = (most[i + 1] - least[i]) // 32 + 2
            unit = ExactSums(len(sums.totals))
            unit.exponent = least[i]
            unit.merge(sums)
            limbs.append(unit.as_limbs(least[i], words))
        total = {"limbs": limbs, "others": mine._others, "count": np.int64(mine._count)}
        total = self._all_reduce("SUM", total)
        whole._sums, whole._squares = (
            ExactSums.from_limbs(words, exponent)
            for words, exponent in zip(total["limbs"], least[::2], strict=True)
        )
        whole._others, whole._count = total["others"], int(total["count"])
        whole._least = self._all_reduce("MIN", mine._least)
        whole._most = self._all_reduce("MAX", mine._most)
        return whole

    def _describe(self) -> Description:
        if self._dtype is None:
            nan = np.float64(np.nan)
            return Description(0, nan, nan, nan, nan, nan)
        columns = range(len(self._sums.totals))
        variance = self._shaped(np.array([self._variance(i) for i in columns], float))
        return Description(
            self._count,
            self._shaped(np.array([self._mean(i) for i in columns], float)),
            variance,
            np.sqrt(variance),
            self._extreme(self._least),
            self._extreme(self._most),
        )

    def _mean(self, column: int) -> float:
        if not self._count:
            return math.nan
        nan, above, below = self._others[:, column]
        if nan or (above and below):
            return math.nan
        if above or below:
            return math.inf if above else -math.inf
        return ratio(self._sums.totals[column], self._count, self._sums.exponent)

    def _variance(self, column: int) -> float:
        """Return (n * sum of squares - square of the sum) / (n * (n - ddof))."""
        number, degrees = self._count, self._count - self._ddof
        if degrees <= 0 or self._others[:, column].any():
            return math.nan
        squares, exponent = self._squares.totals[column], self._squares.exponent
        total, unit = self._sums.totals[column], 2 * self._sums.exponent
        least = min(exponent, unit)
        excess = (number * squares << exponent - least) - (total**2 << unit - least)
        return ratio(excess, number * degrees, least)

    def _extreme(self, values: Any) -> Any:
        if not self._count:
            return self._shaped(np.full(len(values), np.nan))
        return self._shaped(values.astype(self._dtype))

    def _shaped(self, values: Any) -> Any:
        return values.reshape(self._shape)[()]

    def _add(self, other: Moments) -> None:
        if other._dtype is None:
            return
        if self._dtype is None:
            self._begin(other._dtype, other._shape)
        self._count += other._count
        self._sums.merge(other._sums)
        self._squares.merge(other._squares)
        self._others += other._others
        np.minimum(self._least, other._least, out=self._least)
        np.maximum(self._most, other._most, out=self._most)

    def _to_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"kind": "Moments", "settings": self._settings()}
        if self._dtype is None:
            return state
        state |= {"dtype": str(self._dtype), "shape": list(self._shape)}
        for name, sums in (("sums", self._sums), ("squares", self._squares)):
            words = sums.bits // 32 + 2
            state |= {
                name: sums.as_limbs(sums.exponent, words),
                f"{name}_exponent": sums.exponent,
            }
        return state | {
            "count": self._count,
            "not_finite": self._others,
            "least": self._least,
            "most": self._most,
        }

    def _from_state(self, state: Mapping[str, Any]) -> None:
        if "dtype" not in state:
            return
        self._begin(dtype_of(state["dtype"]), tuple(map(int, state["shape"])))
        self._sums, self._squares = (
            ExactSums.from_limbs(state[name], int(state[f"{name}_exponent"]))
            for name in ("sums", "squares")
        )
        self._count, self._others = int(state["count"]), np.array(state["not_finite"])
        self._least, self._most = np.array(state["least"]), np.array(state["most"])


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which minimum and maximum are stored."""
    return np.dtype(np.uint8) if dtype == np.bool_ else accumulator_dtype(dtype)


def describe(strategy: Strategy, rows: Any, ddof: int = 0) -> Any:
    """See `Strategy.statistics_of`.

    Example:
      >>> print(mpidist.statistics.describe(strategy, np.array([1.0, 3.0])).mean)
      2.0
    """

    def add_all() -> Any:
        moments: Any = None
        batches: Iterable[Any] = [rows]
        if isinstance(rows, DistributedDataset):
            require_end(rows.cardinality, _CALL)
            batches = rows
        for batch in batches:
            moments = _add(select_replica(batch), moments, ddof, strategy)
        return Moments(ddof, strategy) if moments is None else moments

    def structure(moments: Any) -> CallSignature:
        leaves, spec = nest.flatten(moments)
        return CallSignature(_CALL, (("ddof", ddof),), spec, ("rows",) * len(leaves))

    consensus = strategy.extended.consensus
    moments = consensus.run(_CALL, add_all, same=structure)
    # In the same order on all ranks, whatever order their dicts have
    return consensus.run(
        _CALL, lambda: nest.map_leaves(lambda part: part.result(), moments)
    )


def _add(rows: Any, moments: Any, ddof: int, strategy: Strategy) -> Any:
    """Return `Moments` with these rows, too, in the structure of the rows.

    `moments`: those of earlier rows, or None.
    """
    if isinstance(rows, Mapping):
        return {
            name: _add(part, moments and moments[name], ddof, strategy)
            for name, part in rows.items()
        }
    if isinstance(rows, tuple) and any(map(np.ndim, rows)):
        before = moments or [None] * len(rows)
        parts = [_add(*pair, ddof, strategy) for pair in zip(rows, before, strict=True)]
        return type(rows)(*parts) if hasattr(rows, "_fields") else tuple(parts)
    if moments is None:
        moments = Moments(ddof, strategy)
    moments.update_state(rows)
    return moments
