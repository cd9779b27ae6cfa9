"""Iterating over divided datasets: threads that end, failures alike on all ranks."""

import threading

import numpy as np
import pytest
from all_ranks import require_usable
from datasets import numbers

import mpidist

MESSAGE = "damaged on purpose"


def readers(before):
    return set(threading.enumerate()) - before


def test_an_iterator_that_is_closed_or_at_its_end_has_no_thread(
    strategy, read_in_threads
):
    before = set(threading.enumerate())
    divided = strategy.experimental_distribute_dataset(numbers(400).batch(4))
    iterator = iter(divided)
    next(iterator)
    assert readers(before)
    iterator.close()
    assert not readers(before)
    at_its_end = iter(divided)
    list(at_its_end)
    assert not readers(before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "build",
    [
        lambda odd: numbers(16 + odd).batch(4),
        lambda odd: numbers(17 + odd).batch(4),
        lambda odd: numbers(16, np.int32 if odd else np.int64).batch(4),
        lambda odd: numbers(16).batch(4 + odd),
        lambda odd: numbers(16).batch(4, drop_remainder=odd),
        lambda odd: numbers(16).shuffle(seed=int(odd)).batch(4),
        lambda odd: (
            numbers(16).shuffle(seed=0).batch(4) if odd else numbers(16).batch(4)
        ),
        lambda odd: numbers(16).repeat(None if odd else 2).batch(4),
    ],
)
def test_unlike_datasets_are_refused_on_all_ranks(strategy, comm, build):
    dataset = build(comm.rank == comm.size - 1)
    with pytest.raises(mpidist.MismatchError, match="dataset"):
        strategy.experimental_distribute_dataset(dataset)
    require_usable(strategy)


def test_next_inside_a_replica_function_is_refused(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(numbers(8).batch(4)))
    with pytest.raises(ValueError, match="inside a replica function"):
        strategy.run(lambda: next(iterator))
    with strategy.scope():
        assert strategy.reduce("SUM", next(iterator), axis=0) == 6
    require_usable(strategy)
    iterator.close()  # the error's traceback holds it for a while


def test_what_an_input_function_raises_on_one_rank_is_raised_on_all(strategy, comm):
    def make(ctx):
        if ctx.input_pipeline_id == ctx.num_input_pipelines - 1:
            raise KeyError(MESSAGE)
        return numbers(4).batch(2)

    with pytest.raises(KeyError, match=MESSAGE):
        strategy.distribute_datasets_from_function(make)
    require_usable(strategy)


def test_an_input_function_must_return_a_dataset_on_every_rank(strategy, comm):
    last = comm.size - 1
    with pytest.raises(TypeError, match=r"needs a mpidist\.Dataset"):
        strategy.distribute_datasets_from_function(
            lambda ctx: None if ctx.input_pipeline_id == last else numbers(4).batch(2)
        )
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_unbatched_datasets_of_unequal_length_are_refused(strategy):
    with pytest.raises(ValueError, match=r"call batch\("):
        strategy.distribute_datasets_from_function(
            lambda ctx: numbers(3 + ctx.input_pipeline_id)
        )
    require_usable(strategy)


def test_next_after_the_strategy_is_finalized_is_refused(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    divided = strategy.experimental_distribute_dataset(numbers(40).batch(4))
    iterator = iter(divided)
    next(iterator)
    strategy.experimental_finalize()
    with pytest.raises(RuntimeError, match="final"):
        next(iterator)
    iterator.close()
    with pytest.raises(RuntimeError, match="final"):
        strategy.experimental_distribute_dataset(numbers(40).batch(4))


def test_datasets_of_another_strategy_are_not_made_in_a_scope(comm, strategy):
    other = mpidist.MirroredStrategy(communicator=comm)
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing"):
        other.experimental_distribute_dataset(numbers(8).batch(4))
    other.experimental_finalize()
    require_usable(strategy)


EXIT_IN_MAP = """
import sys
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy()

def leave(x):
    if x == 3:
        sys.exit(1)
    return x

data = mpidist.Dataset.from_tensor_slices(np.arange(8)).map(leave).batch(2)
for batch in strategy.experimental_distribute_dataset(data):
    strategy.reduce("SUM", batch, axis=0)
"""


def test_an_exit_in_a_mapped_function_of_one_rank_ends_the_job(mpirun):
    ended = mpirun(2, EXIT_IN_MAP, fails=True)
    assert "rank 0 left" in ended.stderr or "rank 1 left" in ended.stderr
    assert "by SystemExit: 1" in ended.stderr
