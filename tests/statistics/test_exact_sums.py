"""Sums and squares without rounding: fractions.Fraction is the oracle."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.extra import numpy as some_arrays

from mpidist.statistics.moments import (
    ExactSums,
    exact_parts,
    exact_squares,
    ratio,
)

FLOATS = some_arrays.arrays(
    np.float64,
    some.tuples(some.integers(0, 20), some.integers(1, 3)),
    elements=some.floats(allow_nan=False, allow_infinity=False),
)
INTEGERS = some.sampled_from(["i1", "u1", "i4", "u4", "i8", "u8"]).flatmap(
    lambda dtype: some_arrays.arrays(
        dtype, some.tuples(some.integers(0, 20), some.integers(1, 3))
    )
)


def totals(parts, columns):
    sums = ExactSums(columns)
    sums.add_rows(parts)
    return [Fraction(total) * Fraction(2) ** sums.exponent for total in sums.totals]


def require_exact(rows):
    columns = rows.shape[1]
    exact = [[Fraction(number) for number in column] for column in rows.T.tolist()]
    assert totals(exact_parts(rows), columns) == [sum(column) for column in exact]
    squares = [sum(number**2 for number in column) for column in exact]
    assert totals(exact_squares(rows), columns) == squares


@settings(deadline=None, max_examples=200)
@given(FLOATS)
def test_floats(rows):
    require_exact(rows)


@settings(deadline=None, max_examples=200)
@given(INTEGERS)
def test_integers(rows):
    require_exact(rows)


@settings(deadline=None)
@given(some.lists(some.integers(-(2**200), 2**200), min_size=1), some.integers(0, 70))
def test_words_hold_integers(numbers, shift):
    sums = ExactSums(len(numbers))
    sums.totals, sums.exponent = numbers, -5
    words = (sums.bits + shift) // 32 + 2
    limbs = sums.as_limbs(-5 - shift, words)
    # As if added up over two ranks
    found = ExactSums.from_limbs(limbs + limbs, -5 - shift)
    assert found.totals == [2 * number << shift for number in numbers]
    assert ((limbs[:-1] >= 0) & (limbs[:-1] < 2**32)).all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1, 3, 0), 1 / 3),
        ((1, 1, 1024), np.inf),
        ((-1, 1, 1024), -np.inf),
        ((1, 1, -1074), 5e-324),
        ((1, 1, -1076), 0.0),
        ((2**200 + 1, 2**200, 0), 1.0),
    ],
)
def test_ratio(arguments, expected):
    assert ratio(*arguments) == expected
