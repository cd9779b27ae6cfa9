"""Which rows go where: slices of batches, and permutations without a table."""

import collections
import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.data.sharding import Permutation
from mpidist.util.shares import BatchShare

pure = settings(derandomize=True, database=None, deadline=None)


def permuted(length, seed=0, epoch=0):
    return Permutation(length, seed, epoch)(np.arange(length))


@pure
@given(rows=st.integers(0, 10**15), replicas=st.integers(1, 70))
def test_slices_are_full_shares_and_then_the_rest_and_then_none(rows, replicas):
    slices = [BatchShare(replicas, r).of(rows) for r in range(replicas)]
    sizes = [s.stop - s.start for s in slices]
    share = (rows + replicas - 1) // replicas
    full, rest = divmod(rows, share) if share else (0, 0)
    assert sizes == ([share] * full + [rest] + [0] * replicas)[:replicas]
    assert sum(sizes) == rows


def test_every_permutation_up_to_length_300_is_a_bijection():
    for length in range(1, 301):
        for epoch in range(3):
            order = np.sort(permuted(length, seed=length, epoch=epoch))
            assert order.tolist() == list(range(length))


@pytest.mark.parametrize("length", [10**12, 2**53 + 1, 2**63 - 1])
def test_rows_of_a_huge_length_are_distinct_and_in_range(length):
    positions = np.random.default_rng(0).integers(0, length, 50_000)
    positions = np.unique(np.append(positions, [0, 1, length - 2, length - 1]))
    rows = Permutation(length, seed=3)(positions)
    assert rows.dtype == np.int64
    assert rows.min() >= 0
    assert rows.max() < length
    assert np.unique(rows).size == positions.size


def test_a_position_has_the_same_row_however_it_is_asked_for():
    order = permuted(100, seed=5)
    permutation = Permutation(100, seed=5)
    positions = np.array([[99, 0, 7], [7, 50, 1]])
    np.testing.assert_array_equal(permutation(positions), order[positions])
    assert [int(permutation([i])[0]) for i in range(100)] == order.tolist()
    assert permutation(np.zeros((0, 3), int)).shape == (0, 3)


def test_seeds_and_epochs_have_orders_of_their_own():
    seeds = [0, 1, 2, -1, 2**40, 2**63, 2**64 - 1, 2**64, -(2**64), 2**255, -(2**256)]
    orders = [tuple(permuted(50, s, e)) for s in seeds for e in range(20)]
    assert len(set(orders)) == len(orders)
    assert tuple(permuted(50, 2, 7)) == tuple(permuted(50, 2, 7))


@pytest.mark.parametrize("positions", [[-1], [0, 10], [[3], [11]]])
def test_positions_outside_the_length_are_refused(positions):
    with pytest.raises(ValueError, match=r"must be in 0\.\.9"):
        Permutation(10, seed=0)(positions)


@pytest.mark.parametrize("vary", ["seed", "epoch"])
def test_every_row_is_equally_likely_at_every_position(vary):
    length, draws = 20, 4000
    counts = np.zeros((length, length))
    for i in range(draws):
        counts[np.arange(length), permuted(length, **{vary: i})] += 1
    expected = draws / length
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (length - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_a_long_permutation_takes_no_memory_for_its_length():
    permutation, positions = Permutation(10**12, seed=0), np.arange(1000)
    permutation(positions)
    tracemalloc.start()
    permutation(positions)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 3, 5, 6])
def test_every_order_of_a_few_rows_is_about_as_likely(length):
    draws = 200 * math.factorial(length)
    orders = collections.Counter(
        tuple(permuted(length, seed=1, epoch=epoch).tolist()) for epoch in range(draws)
    )
    assert len(orders) == math.factorial(length)
    chi_square = sum((n - 200) ** 2 / 200 for n in orders.values())
    freedom = len(orders) - 1
    # Five standard deviations of the statistic, with seeds that never change
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("length", [1, 10, 65_536, 65_537, 100_003])
def test_positions_near_each_other_have_the_rows_of_any(length):
    permutation, every = Permutation(length, seed=4, epoch=1), permuted(length, 4, 1)
    for first, last in [(0, 300), (16_300, 16_500), (length - 7, length), (0, length)]:
        positions = np.arange(max(0, first), min(last, length))[::-1]
        assert permutation.near(positions).tolist() == every[positions].tolist()
    with pytest.raises(ValueError, match="positions must be in"):
        permutation.near(np.array([length]))


@pytest.mark.parametrize("length", [1, 10, 65_536, 65_537, 100_003])
def test_the_inverse_leads_back(length):
    permutation = Permutation(length, seed=4, epoch=1)
    assert permutation.inverse(permutation(np.arange(length))).tolist() == list(
        range(length)
    )


def test_the_orders_stay_as_they_are_in_the_next_version():
    """A checkpoint holds seed, epoch and position, and relies on this."""
    assert permuted(8, seed=1, epoch=2).tolist() == [1, 7, 6, 2, 0, 4, 5, 3]
    long = Permutation(10**12, seed=1, epoch=2)
    expected = [195562354369, 776341267812, 385729802432, 155196533829]
    assert long(np.arange(4)).tolist() == expected


def test_epochs_of_any_size_have_orders_of_their_own():
    epochs = [e << shift for e in (1, 2, 3) for shift in (0, 40, 64, 80, 120)]
    for length in (50, 1 << 17):  # with a table, and without
        orders = {tuple(Permutation(length, 1, e)(np.arange(50))) for e in epochs}
        assert len(orders) == len(epochs)
