"""Loops over this replica's arrays."""

import numpy as np
import pytest
from all_ranks import local

import mpidist
from mpidist import Dataset


def test_a_loop_of_ones_own_sees_each_row_once(strategy, comm):
    rows = {"x": np.arange(21.0).reshape(7, 3), "y": np.arange(7)}
    dataset = Dataset.from_tensor_slices(rows).shuffle(seed=1).batch(3)
    train = strategy.experimental_distribute_dataset(dataset)
    own = list(mpidist.as_arrays(train))
    assert all(type(batch["x"]) is np.ndarray for batch in own)
    everyone = [
        row for part in comm.allgather(own) for batch in part for row in batch["y"]
    ]
    assert sorted(everyone) == list(range(7))
    assert len(mpidist.as_arrays(train)) == 3
    pairs = zip(own, strategy.experimental_distribute_dataset(dataset))
    assert all(np.array_equal(a["x"], local(strategy, b["x"])) for a, b in pairs)


@pytest.mark.parametrize("other", [3, [np.ones(3)], Dataset.range(4).batch(2)])
def test_what_is_not_distributed_is_refused(other):
    """Each replica would read all rows."""
    with pytest.raises(mpidist.ArgumentTypeError, match="as_arrays needs what strat"):
        mpidist.as_arrays(other)
