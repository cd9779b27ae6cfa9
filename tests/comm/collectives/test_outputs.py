"""Memory of results: large ones are used again once nobody refers to them."""

import numpy as np

from mpidist.comm.collectives.plans import Results

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
