"""Sums of floats without rounding, so that the order of summation does not matter.

A block of rows is split, column by column, into parts with so few bits that NumPy adds
them up without rounding (ExtractVector in S. M. Rump, T. Ogita, S. Oishi: Accurate
Floating-Point Summation, part I, SIAM J. Sci. Comput. 31, 2008). The sums of the parts
are added to Python integers, which have as many bits as necessary. Squares are products
without rounding: T. J. Dekker, A floating-point technique for extending the available
precision, Numer. Math. 18, 1971.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpidist.util.dtypes import is_integer

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
    """One sum per column, as integers in units of a power of two.

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
