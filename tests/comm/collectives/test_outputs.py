"""Memory of results: large ones are used again once nobody refers to them."""

import numpy as np

from mpidist.comm.collectives.plans import Results, StepResults
from mpidist.util.available_memory import LINE_BYTES

LIKE = np.zeros(3, "f4")
LARGE = 100_000  # of elements


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_of_a_large_result_is_used_again():
    results = Results()
    one = results.empty(LARGE, LIKE)
    view, first = one[5:], address(one)
    del one
    assert address(results.empty(LARGE, LIKE)) != first  # a view is left
    del view
    assert address(results.empty(LARGE, LIKE)) == first


def test_results_of_a_step_lie_behind_each_other():
    results = StepResults()
    results.begin(4 * LARGE, LIKE)
    parts = [results.empty(size, LIKE, dtype) for size, dtype in ((7, "f8"), (9, "i2"))]
    assert address(parts[1]) - address(parts[0]) == LINE_BYTES
    large = results.empty(LARGE, LIKE)  # for which there is no more room
    assert not any(np.shares_memory(large, part) for part in parts)
    parts[0][...], parts[1][...] = 1, 2
    assert parts[0].sum() == 7
    assert parts[1].sum() == 18


def test_the_next_step_has_other_memory_as_long_as_results_are_held():
    results = StepResults()
    results.begin(4 * LARGE, LIKE)
    held = results.empty(10, LIKE)
    results.end()
    results.begin(4 * LARGE, LIKE)
    other = results.empty(10, LIKE)
    assert not np.shares_memory(held, other)
    first = address(held)
    del held
    results.end()
    results.begin(4 * LARGE, LIKE)
    assert address(results.empty(10, LIKE)) == first
