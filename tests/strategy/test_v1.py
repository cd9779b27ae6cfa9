"""Scripts in the style of TensorFlow 1, with the module's name changed."""

import numpy as np
import pytest
from all_ranks import local

import mpidist


def test_the_pages_input_fn_example(strategy):
    def input_fn(input_context):
        d = mpidist.Dataset.from_tensors(np.array([[1.0]])).repeat()
        return d.shard(
            input_context.num_input_pipelines, input_context.input_pipeline_id
        )

    def replica_fn(x):
        return x + 1

    with strategy.scope():
        iterator = strategy.make_input_fn_iterator(input_fn)
        for _ in range(3):
            replica_results = strategy.extended.call_for_each_replica(
                replica_fn, iterator.get_next()
            )
            np.testing.assert_array_equal(local(strategy, replica_results), [[2.0]])


def test_a_training_loop_with_a_dataset_iterator(strategy):
    n = strategy.num_replicas_in_sync
    rows = np.arange(6.0 * n)
    dataset = strategy.experimental_make_numpy_dataset(rows).batch(2 * n)
    strategy.experimental_initialize()
    iterator = strategy.make_dataset_iterator(dataset)
    for _ in range(2):
        iterator.initialize()
        sums = []
        with pytest.raises(mpidist.OutOfRangeError):
            while True:
                squared = strategy.experimental_run(lambda x: x * x, iterator)
                sums.append(float(strategy.reduce("SUM", squared, axis=0)))
        assert sums == [float((b**2).sum()) for b in np.split(rows, 3)]
    strategy.experimental_finalize()


@pytest.mark.mpi(min_size=2)
def test_a_batch_that_cannot_be_divided_names_the_other_iterator(strategy):
    n = strategy.num_replicas_in_sync
    with pytest.raises(ValueError, match="make_input_fn_iterator"):
        strategy.make_dataset_iterator(mpidist.Dataset.range(9).batch(2 * n + 1))
    assert strategy.reduce("SUM", 1) == n


def test_other_replication_modes_are_refused(strategy):
    with pytest.raises(ValueError, match="PER_WORKER"):
        strategy.make_input_fn_iterator(
            lambda context: mpidist.Dataset.range(4).batch(2),
            mpidist.InputReplicationMode.PER_REPLICA,
        )


def test_what_an_input_fn_may_not_return(strategy):
    with pytest.raises(ValueError, match="input_fn"):
        strategy.make_input_fn_iterator(lambda context: 7)
