"""Mean, variance, minimum and maximum of each column, rounded once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.comm.consensus.signatures import CallSignature
from mpidist.data.dataset import require_end
from mpidist.data.distributed.datasets import DistributedDataset
from mpidist.errors import ArgumentError
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


# A block should fit in the cache, but each block costs a microsecond per column
_BLOCK_ITEMS, _BLOCK_ROWS = 1 << 16, 128
_LIMB_BITS = 32
# Numbers of larger, or smaller, magnitude are scaled first
_LARGE, _SQUARE_LARGE, _SQUARE_SMALL = 2.0**900, 2.0**480, 2.0**-480
_SCALE_BITS, _SQUARE_SCALE_BITS = 200, 600
_WEIGHTED_LARGE = 2.0**373
_SPLITTER = 2.0**27 + 1
# The squares of integers of so many bits are exact in float64
_FEW_BITS = 26

# float64 numbers, and the power of two by which to multiply them
Part = tuple[Any, int]


class ExactSums:
    """One sum per column without rounding: integers in units of a power of two.

    So the order of summation does not matter. A block of rows is split, column by
    column, into parts with so few bits that NumPy adds them up without rounding
    (ExtractVector in S. M. Rump, T. Ogita, S. Oishi: Accurate Floating-Point Summation,
    part I, SIAM J. Sci. Comput. 31, 2008). The sums of the parts are added to Python
    integers, which have as many bits as necessary. Squares are products without
    rounding: T. J. Dekker, A floating-point technique for extending the available
    precision, Numer. Math. 18, 1971.

    Args:
      columns: the number of columns.
    """

    def __init__(self, columns: int) -> None:
        self.totals = [0] * columns
        self.exponent = 0  # the unit is 2 ** exponent

    def add(self, values: Any, exponent: int = 0) -> None:
        """Add one number per column, times 2 ** exponent.

        Args:
          values: float64 of shape (columns,), finite.
          exponent: see above.
        """
        mantissas, exponents = np.frexp(values)
        integers = np.ldexp(mantissas, 53).astype(np.int64)
        places = exponents.astype(np.int64) + (exponent - 53)
        places[integers == 0] = np.iinfo(np.int64).max
        least = int(places.min(initial=np.iinfo(np.int64).max))
        if least == np.iinfo(np.int64).max:
            return
        self._lower(least)
        shifts = np.where(integers == 0, 0, places - self.exponent)
        pairs = zip(self.totals, integers.tolist(), shifts.tolist(), strict=True)
        self.totals = [total + (value << shift) for total, value, shift in pairs]

    def add_rows(self, parts: Iterator[Part]) -> None:
        """Add all rows of arrays of shape (rows, columns), see `Part`."""
        for rows, exponent in parts:
            for values in _column_sums(rows):
                self.add(values, exponent)

    def merge(self, other: ExactSums) -> None:
        """Add other sums of as many columns."""
        self._lower(other.exponent)
        shift = other.exponent - self.exponent
        pairs = zip(self.totals, other.totals, strict=True)
        self.totals = [total + (value << shift) for total, value in pairs]

    def _lower(self, exponent: int) -> None:
        """Take a smaller unit, where it is one."""
        if exponent < self.exponent:
            shift = self.exponent - exponent
            self.totals = [total << shift for total in self.totals]
            self.exponent = exponent

    @property
    def bits(self) -> int:
        """The number of bits of the longest total."""
        return max((total.bit_length() for total in self.totals), default=0)

    def as_limbs(self, exponent: int, count: int) -> Any:
        """Return the totals in units of 2 ** exponent, 32 bits in each word.

        Args:
          exponent: at most `self.exponent`.
          count: the number of words; they must have room for all bits and a sign.

        Returns:
          int64 of shape (count, columns), least significant word first. All words are
          in 0...2**32 - 1, except the last one, which is signed. So the words of up to
          2**31 ranks can be summed.
        """
        shift, size = self.exponent - exponent, 4 * count
        data = b"".join(
            (total << shift).to_bytes(size, "little", signed=True)
            for total in self.totals
        )
        words = np.frombuffer(data, "<u4").reshape(len(self.totals), count)
        limbs = words.T.astype(np.int64)
        limbs[-1] = words.T[-1].astype(np.uint32).view(np.int32)
        return limbs

    @classmethod
    def from_limbs(cls, limbs: Any, exponent: int) -> ExactSums:
        """Return the sums for the words of `as_limbs`, or for sums of such words."""
        sums = cls(limbs.shape[1])
        sums.exponent = exponent
        for place, words in enumerate(limbs.tolist()):
            pairs = zip(sums.totals, words, strict=True)
            sums.totals = [a + (b << (_LIMB_BITS * place)) for a, b in pairs]
        return sums


def ratio(numerator: int, denominator: int, exponent: int) -> float:
    """Return numerator * 2**exponent / denominator, rounded once."""
    if exponent >= 0:
        numerator <<= exponent
    else:
        denominator <<= -exponent
    try:
        return numerator / denominator  # correctly rounded by Python
    except OverflowError:
        return float("inf") if numerator > 0 else float("-inf")


def exact_parts(rows: Any) -> Iterator[Part]:
    """Yield float64 arrays with the same sum as the rows.

    Args:
      rows: finite numbers or integers of shape (rows, columns).
    """
    for block in _blocks(rows):
        if is_integer(block.dtype):
            yield from _halves(block)
            continue
        block = block.astype(np.float64)
        is_large = np.abs(block) > _LARGE
        if is_large.any():
            large = np.where(is_large, block, 0.0)
            yield np.ldexp(large, -_SCALE_BITS), _SCALE_BITS
            block[is_large] = 0.0
        yield block, 0


def exact_squares(rows: Any) -> Iterator[Part]:
    """Yield float64 arrays with the sum of the squares; see `exact_parts`."""
    for block in _blocks(rows):
        if is_integer(block.dtype):
            yield from _squares_of_integers(block)
        elif block.dtype.itemsize < 8:
            block = block.astype(np.float64)
            yield block * block, 0
        else:
            yield from _squares(block.astype(np.float64, copy=False))


def weighted_parts(rows: Any, weights: Any, power: int) -> Iterator[Part]:
    """Yield float64 arrays with the sum of weights * rows**power; see `exact_parts`.

    Args:
      rows: finite floats, or integers that float64 holds.
      weights: float64 of shape (rows,), 2**-64 to 2**64.
      power: 0, 1 or 2.
    """
    start = 0
    for block in _blocks(rows):
        weight = weights[start : start + len(block), None]
        start += len(block)
        if not power:
            yield np.repeat(weight, rows.shape[1], axis=1), 0
            continue
        for part, exponent in _by_magnitude(block.astype(np.float64)):
            terms = list(_products(weight, part, exponent))
            if power == 2:
                terms = [
                    product
                    for term, bits in terms
                    for product in _products(term, part, bits + exponent)
                ]
            yield from terms


def _by_magnitude(block: Any) -> Iterator[Part]:
    """Yield arrays with the sum of `block`; weights * squares of them are exact."""
    sizes = np.abs(block)
    is_large, is_small = sizes > _WEIGHTED_LARGE, sizes < 1 / _WEIGHTED_LARGE
    for where, bits in ((is_large, 700), (is_small & (sizes > 0), -700)):
        if where.any():
            yield np.ldexp(np.where(where, block, 0.0), -bits), bits
    yield np.where(is_large | is_small, 0.0, block), 0


def _blocks(rows: Any) -> Iterator[Any]:
    length = max(_BLOCK_ROWS, _BLOCK_ITEMS // max(1, rows.shape[1]))
    for begin in range(0, len(rows), length):
        yield rows[begin : begin + length]


def _column_sums(block: Any) -> Iterator[Any]:
    """Yield rows whose sums are those of the columns.

    Overwrites the block, whose magnitudes are below 2**1000.
    """
    if len(block) == 1:
        yield block[0]
        return
    # Each part is a multiple of 2**-53 * sigma, and the sum of all is less than sigma,
    # so that all partial sums are exact in float64
    spare_bits = (len(block) + 1).bit_length()
    while True:
        most = np.maximum(block.max(axis=0), -block.min(axis=0))
        if not most.any():
            return
        sigma = np.ldexp(1.0, np.frexp(most)[1] + spare_bits)
        parts = block + sigma
        parts -= sigma
        yield parts.sum(axis=0)
        block -= parts


def _halves(block: Any) -> Iterator[Part]:
    """Yield the upper and lower half of integers."""
    if block.dtype.itemsize < 8:
        yield block.astype(np.float64), 0
        return
    yield (block >> 32).astype(np.float64), 32
    yield (block & 0xFFFFFFFF).astype(np.float64), 0


def _squares_of_integers(block: Any) -> Iterator[Part]:
    most = max(int(block.max(initial=0)), -int(block.min(initial=0)))
    if most.bit_length() <= _FEW_BITS:
        block = block.astype(np.float64)
        yield block * block, 0
        return
    if block.dtype.itemsize < 8:
        yield from _products(block.astype(np.float64), block.astype(np.float64), 0)
        return
    upper, lower = (block >> 32).astype(float), (block & 0xFFFFFFFF).astype(float)
    yield from _products(upper, upper, 64)
    yield from _products(upper, lower, 33)  # twice
    yield from _products(lower, lower, 0)


def _squares(block: Any) -> Iterator[Part]:
    sizes = np.abs(block)
    is_large = sizes > _SQUARE_LARGE
    is_small = (sizes < _SQUARE_SMALL) & (sizes > 0)
    for where, bits in (
        (is_large, _SQUARE_SCALE_BITS),
        (is_small, -_SQUARE_SCALE_BITS),
    ):
        if where.any():
            scaled = np.ldexp(np.where(where, block, 0.0), -bits)
            yield from _products(scaled, scaled, 2 * bits)
            block = np.where(where, 0.0, block)
    yield from _products(block, block, 0)


def _products(a: Any, b: Any, exponent: int) -> Iterator[Part]:
    """Yield the products rounded to float64, and their rounding errors."""
    product = a * b
    (a_upper, a_lower), (b_upper, b_lower) = _split(a), _split(b)
    rest = a_upper * b_upper
    rest -= product
    rest += a_upper * b_lower
    rest += a_lower * b_upper
    rest += a_lower * b_lower
    yield product, exponent
    yield rest, exponent


def _split(numbers: Any) -> tuple[Any, Any]:
    """Split `numbers` into a sum of two arrays with at most 26 bits per number."""
    upper = _SPLITTER * numbers
    upper -= upper - numbers
    return upper, numbers - upper
