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
    weighted_parts,
)
from mpidist.statistics.statistic import Statistic, host_rows, row_shape
from mpidist.util import nest, validation
from mpidist.util.dtypes import (
    accumulator_dtype,
    digits,
    dtype_of,
    is_beyond_exact,
    is_integer,
)
from mpidist.values import select_replica

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

_CALL = "statistics_of"
_NAN, _ABOVE, _BELOW = range(3)  # numbers that are not finite
_WEIGHTED, _LEAST_WEIGHT = " with weights", 2.0**-64


@dataclasses.dataclass(frozen=True)
class Description:
    """The result of `Moments.result`. Arrays have the shape of one row.

    Args:
      count: the number of rows of all ranks, without those of weight 0; if nan is
        skipped, that of the numbers in each place of a row.
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

    count: Any
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
      ddof: the divisor of the variance is the number of rows minus `ddof`, as in NumPy;
        with weights it is their sum minus `ddof`.
      strategy: see `Statistic`.
      skip_nan: whether nan is left out, as by `numpy.nanmean`: missing values, such as
        a masked array's after `.filled(np.nan)`.

    Example:
      >>> moments = mpidist.statistics.Moments(strategy=strategy)
      >>> rank = strategy.rank
      >>> moments.update_state(np.array([[1.0, 10.0], [2.0, 20.0]]) + rank)
      >>> found = moments.result()
      >>> found.count, found.mean, found.maximum
      (4, array([ 2. , 15.5]), array([ 3., 21.]))
    """

    def __init__(
        self,
        ddof: int = 0,
        strategy: Strategy | None = None,
        *,
        skip_nan: bool = False,
    ):
        self._ddof = validation.integer("ddof", ddof, 0)
        self._skip_nan = validation.switch("skip_nan", skip_nan)
        super().__init__(strategy)

    def reset_state(self) -> None:
        """Remove the rows that this rank has added. Not collective."""
        self._count = 0
        self._dtype: np.dtype[Any] | None = None
        self._shape: tuple[int, ...] = ()
        self._sums = self._squares = ExactSums(0)
        self._weights: ExactSums | None = None  # their sums, if there are any
        self._others: Any = None  # numbers of nan, inf and -inf in each column
        self._least: Any = None
        self._most: Any = None

    def update_state(self, rows: Any, sample_weight: Any = None) -> None:
        """Add rows of this rank. Not collective.

        Args:
          rows: numbers of shape (rows, ...), possibly zero rows; an array of NumPy,
            CuPy, PyTorch or JAX of float16, bfloat16, float32, float64, integers or
            bool.
          sample_weight: numbers of shape (rows,), such as the areas of cells: 0, or
            between 2**-64 and 2**64. Given for all rows, or for none.

        Raises:
          ArgumentError: earlier rows have a different dtype or shape; a scalar; weights
            that do not fit the rows, or rows of integers above 2**53 with weights.
          ArgumentTypeError: not numbers.
        """
        if isinstance(rows, list) and not rows:
            return  # of no dtype
        rows, weights = host_rows(rows), None
        if sample_weight is not None:
            weights = _weights_of(sample_weight, rows)
            rows, weights = rows[weights > 0], weights[weights > 0]
        kind = _kind_of(rows.dtype, rows.shape[1:], weights is not None)
        if self._dtype is None:
            self._begin(rows.dtype, rows.shape[1:], weights is not None)
        elif kind != self._rows_kind():
            raise ArgumentError(
                f"rows are {kind}, but earlier rows were {self._rows_kind()}"
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
                self._add_finite(np.where(is_finite, flat, 0), weights, np.isnan(flat))
                return
        self._widen(flat)
        self._add_finite(flat, weights)

    def _begin(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], is_weighted: bool
    ) -> None:
        self._dtype, self._shape = dtype, shape
        columns = math.prod(shape)
        self._sums, self._squares = ExactSums(columns), ExactSums(columns)
        self._weights = ExactSums(columns) if is_weighted else None
        self._others = np.zeros((3, columns), np.int64)
        number = _wide(dtype)
        if digits(number):
            least, most = -np.inf, np.inf
        else:
            least, most = np.iinfo(number).min, np.iinfo(number).max
        self._least = np.full(columns, most, number)
        self._most = np.full(columns, least, number)

    def _widen(self, flat: Any) -> None:
        smaller: np.ufunc = np.fmin if self._skip_nan else np.minimum
        larger: np.ufunc = np.fmax if self._skip_nan else np.maximum
        least, most = smaller.reduce(flat), larger.reduce(flat)
        if digits(flat.dtype):
            # Signs of zeros and bits of nan would depend on the order of the rows
            least, most = (
                np.where(np.isnan(each), np.nan, each + 0) for each in (least, most)
            )
        smaller(self._least, least, out=self._least)
        larger(self._most, most, out=self._most)

    def _count_others(self, flat: Any) -> None:
        self._others[_NAN] += np.isnan(flat).sum(axis=0)
        self._others[_ABOVE] += (flat == np.inf).sum(axis=0)
        self._others[_BELOW] += (flat == -np.inf).sum(axis=0)

    def _add_finite(self, flat: Any, weights: Any, is_nan: Any = None) -> None:
        """Add finite numbers; 0 stands for those that are not finite."""
        if self._weights is None:
            self._sums.add_rows(exact_parts(flat))
            self._squares.add_rows(exact_squares(flat))
            return
        self._weights.add_rows(weighted_parts(flat, weights, 0))
        if is_nan is not None and self._skip_nan:  # these have no weight
            self._weights.add_rows(weighted_parts(-1.0 * is_nan, weights, 1))
        self._sums.add_rows(weighted_parts(flat, weights, 1))
        self._squares.add_rows(weighted_parts(flat, weights, 2))

    def _settings(self) -> str:
        return f"ddof={self._ddof}" + self._skip_nan * ", skip_nan"

    def _rows_kind(self) -> str:
        if self._dtype is None:
            return ""
        return _kind_of(self._dtype, self._shape, self._weights is not None)

    def _every_sum(self) -> dict[str, ExactSums]:
        made = {"sums": self._sums, "squares": self._squares}
        return made if self._weights is None else {**made, "weights": self._weights}

    def _set_sums(self, sums: Mapping[str, ExactSums]) -> None:
        self._sums, self._squares = sums["sums"], sums["squares"]
        self._weights = sums.get("weights")

    def _like(self) -> Moments:
        return Moments(self._ddof, self.distribute_strategy, skip_nan=self._skip_nan)

    def _shown_rows(self) -> str:
        return (
            f"{self._count} rows of {self._rows_kind()}" if self._dtype else "no rows"
        )

    def _extent(self) -> list[int]:
        extent = []
        for sums in self._every_sum().values():
            extent += [sums.exponent, sums.exponent + sums.bits]
        return extent

    def _of_all_ranks(self) -> Moments:
        kind, least, most = self._compare()
        whole = self._like()
        if not kind:
            return whole
        dtype = dtype_of(kind.partition("[")[0])
        # A rank without rows does not know their dtype and shape
        whole._begin(dtype, row_shape(kind), kind.endswith(_WEIGHTED))
        mine = self if self._dtype is not None else whole
        limbs = []
        for i, sums in zip(range(0, len(least), 2), mine._every_sum().values()):
            words = (most[i + 1] - least[i]) // 32 + 2
            unit = ExactSums(len(sums.totals))
            unit.exponent = least[i]
            unit.merge(sums)
            limbs.append(unit.as_limbs(least[i], words))
        total = {"limbs": limbs, "others": mine._others, "count": np.int64(mine._count)}
        total = self._all_reduce("SUM", total)
        pairs = zip(total["limbs"], least[::2], strict=True)
        of_all = [ExactSums.from_limbs(words, exponent) for words, exponent in pairs]
        whole._set_sums(dict(zip(mine._every_sum(), of_all)))
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
            self._shaped(self._counts()) if self._skip_nan else self._count,
            self._shaped(np.array([self._mean(i) for i in columns], float)),
            variance,
            np.sqrt(variance),
            self._extreme(self._least),
            self._extreme(self._most),
        )

    def _counts(self) -> Any:
        return self._count - self._others[_NAN] * self._skip_nan

    def _weight(self, column: int) -> tuple[int, int]:
        """Return the sum of weights, by default 1, in units of a power of two."""
        if self._weights is None:
            return int(self._counts()[column]), 0
        total, exponent = self._weights.totals[column], self._weights.exponent
        return total << max(0, exponent), min(0, exponent)

    def _mean(self, column: int) -> float:
        weight, unit = self._weight(column)
        if not weight:
            return math.nan
        nan, above, below = self._others[:, column]
        if (nan and not self._skip_nan) or (above and below):
            return math.nan
        if above or below:
            return math.inf if above else -math.inf
        return ratio(self._sums.totals[column], weight, self._sums.exponent - unit)

    def _variance(self, column: int) -> float:
        """Return (n * sum of squares - square of the sum) / (n * (n - ddof)).

        n is the number of rows, or the sum of their weights.
        """
        number, bits = self._weight(column)
        degrees = number - (self._ddof << -bits)
        are_finite = not self._others[self._skip_nan :, column].any()
        if degrees <= 0 or not are_finite:
            return math.nan
        squares, exponent = self._squares.totals[column], self._squares.exponent + bits
        total, unit = self._sums.totals[column], 2 * self._sums.exponent
        least = min(exponent, unit)
        excess = (number * squares << exponent - least) - (total**2 << unit - least)
        return ratio(excess, number * degrees, least - 2 * bits)

    def _extreme(self, values: Any) -> Any:
        if not self._count:
            return self._shaped(np.full(len(values), np.nan))
        if self._skip_nan and digits(values.dtype):
            values = np.where(self._counts() > 0, values, np.nan)
        return self._shaped(values.astype(self._dtype))

    def _shaped(self, values: Any) -> Any:
        return values.reshape(self._shape)[()]

    def _add(self, other: Moments) -> None:
        if other._dtype is None:
            return
        if self._dtype is None:
            self._begin(other._dtype, other._shape, other._weights is not None)
        self._count += other._count
        for name, sums in other._every_sum().items():
            self._every_sum()[name].merge(sums)
        self._others += other._others
        np.minimum(self._least, other._least, out=self._least)
        np.maximum(self._most, other._most, out=self._most)

    def _to_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"kind": "Moments", "settings": self._settings()}
        if self._dtype is None:
            return state
        state |= {"dtype": str(self._dtype), "shape": list(self._shape)}
        for name, sums in self._every_sum().items():
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
        shape = tuple(map(int, state["shape"]))
        self._begin(dtype_of(state["dtype"]), shape, "weights" in state)
        found = {
            name: ExactSums.from_limbs(state[name], int(state[f"{name}_exponent"]))
            for name in self._every_sum()
        }
        self._set_sums(found)
        self._count, self._others = int(state["count"]), np.array(state["not_finite"])
        self._least, self._most = np.array(state["least"]), np.array(state["most"])


def _kind_of(dtype: Any, shape: tuple[int, ...], is_weighted: bool) -> str:
    return f"{dtype}{list(shape)}{_WEIGHTED * is_weighted}"


def _weights_of(sample_weight: Any, rows: Any) -> Any:
    """Return the weights of rows as float64."""
    weights = host_rows(sample_weight, "sample_weight").astype(np.float64)
    if weights.shape != rows.shape[:1]:
        raise ArgumentError(
            f"sample_weight has shape {weights.shape}, but there are {len(rows)} rows"
        )
    inside = (weights >= _LEAST_WEIGHT) & (weights <= 1 / _LEAST_WEIGHT)
    if not ((weights == 0) | inside).all():
        raise ArgumentError(
            "sample_weight must be 0, or between 2**-64 and 2**64, not "
            f"{weights[(weights != 0) & ~inside][0]}"
        )
    if is_beyond_exact(rows, np.dtype(np.float64)) and is_integer(rows.dtype):
        raise ArgumentError("rows with sample_weight must be integers up to 2**53")
    return weights


def _wide(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(np.uint8) if dtype == np.bool_ else accumulator_dtype(dtype)


def describe(
    strategy: Strategy, rows: Any, ddof: int = 0, skip_nan: bool = False
) -> Any:
    """See `Strategy.statistics_of`.

    Example:
      >>> print(mpidist.statistics.describe(strategy, np.array([1.0, 3.0])).mean)
      2.0
    """

    def add_all() -> Any:
        moments: Any = None
        empty = Moments(ddof, strategy, skip_nan=skip_nan)
        batches: Iterable[Any] = [rows]
        if isinstance(rows, DistributedDataset):
            require_end(rows.cardinality, _CALL)
            batches = rows
        for batch in batches:
            moments = _add(select_replica(batch), moments, empty)
        return empty if moments is None else moments

    def structure(moments: Any) -> CallSignature:
        leaves, spec = nest.flatten(moments)
        options = ("ddof", ddof), ("skip_nan", skip_nan)
        return CallSignature(_CALL, options, spec, ("rows",) * len(leaves))

    consensus = strategy.extended.consensus
    moments = consensus.run(_CALL, add_all, same=structure)
    # In the same order on all ranks, whatever order their dicts have
    return consensus.run(
        _CALL, lambda: nest.map_leaves(lambda part: part.result(), moments)
    )


def _add(rows: Any, moments: Any, empty: Moments) -> Any:
    """Return `Moments` with these rows, too, in the structure of the rows."""
    if isinstance(rows, Mapping):
        return {
            name: _add(part, moments and moments[name], empty)
            for name, part in rows.items()
        }
    if isinstance(rows, tuple) and any(map(np.ndim, rows)):
        before = moments or [None] * len(rows)
        parts = [_add(*pair, empty) for pair in zip(rows, before, strict=True)]
        return type(rows)(*parts) if hasattr(rows, "_fields") else tuple(parts)
    if moments is None:
        moments = empty._like()
    moments.update_state(rows)
    return moments
