"""Counters that must be equal on all ranks: their digest shows each difference."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm.consensus.thread_order import ProgressCounters

_STEPS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1 << 40)))


def counters(steps: list[tuple[str, int]]) -> ProgressCounters:
    made = ProgressCounters()
    for name, count in steps:
        made.set(name, count)
    return made


@given(_STEPS, _STEPS)
def test_digests_are_equal_if_the_counters_are(
    steps: list[tuple[str, int]], others: list[tuple[str, int]]
) -> None:
    left, right = counters(steps), counters(others)
    assert (left.digest == right.digest) == (dict(steps) == dict(others))
    assert 0 <= left.digest < 1 << 62


def test_counters_that_trade_steps_differ() -> None:
    digests = {
        counters([("a", a), ("b", b), ("c", c)]).digest
        for a, b, c in itertools.product(range(20), repeat=3)
    }
    assert len(digests) == 20**3
