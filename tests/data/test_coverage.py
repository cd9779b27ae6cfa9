"""Every row exactly once per epoch, over more replicas than a job of tests has."""

import numpy as np
from datasets import joined, shuffled
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import Dataset
from mpidist.data.map_dataset import Epoch
from mpidist.util.shares import BatchShare

MOST_REPLICAS = 7


def parts_of(pipeline, epoch, replicas):
    """Return the rows of each replica, for each batch of an epoch."""
    return [
        [
            pipeline.local_batch(Epoch(epoch), i, BatchShare(replicas, replica))
            for replica in range(replicas)
        ]
        for i in range(pipeline.length)
    ]


@settings(derandomize=True, database=None, deadline=None, max_examples=60)
@given(
    rows=st.integers(0, 60),
    batch_size=st.integers(1, 20),
    drop_remainder=st.booleans(),
    seed=st.none() | st.integers(0, 1 << 62),
    reshuffle=st.booleans(),
)
def test_every_row_once_per_epoch_for_any_number_of_replicas(
    rows, batch_size, drop_remainder, seed, reshuffle
):
    dataset = Dataset.range(rows)
    if seed is not None:
        dataset = dataset.shuffle(seed=seed, reshuffle_each_iteration=reshuffle)
    pipeline = dataset.batch(batch_size, drop_remainder).pipeline
    kept = rows - (rows % batch_size if drop_remainder else 0)
    for epoch in range(3):
        order = list(range(rows))
        if seed is not None:
            order = shuffled(rows, seed, epoch if reshuffle else 0)
        for replicas in range(1, MOST_REPLICAS + 1):
            steps = parts_of(pipeline, epoch, replicas)
            assert np.concatenate([[], *joined(steps)]).tolist() == order[:kept]
            for i, parts in enumerate(steps):
                size = min(batch_size, kept - i * batch_size)
                share = -(-size // replicas)
                wanted = [min(share, max(0, size - r * share)) for r in range(replicas)]
                assert list(map(len, parts)) == wanted
