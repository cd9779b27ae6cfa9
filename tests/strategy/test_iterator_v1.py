"""TensorFlow 1's iterators, and asking for a batch that may not be there."""

import threading

import numpy as np
import pytest
from all_ranks import require_usable
from datasets import generated, joined

import mpidist
from mpidist import Dataset, InputReplicationMode, OutOfRangeError

MESSAGE = "damaged on purpose"


numbers = Dataset.range


def local(strategy, value):
    return strategy.experimental_local_results(value)[0].tolist()


def drain(strategy, iterator):
    """This replica's batches up to the end."""
    found = []
    while True:
        try:
            batch = iterator.get_next()
        except OutOfRangeError:
            return found
        found.append(local(strategy, batch))


def in_order(comm, found):
    return [row for parts in zip(*comm.allgather(found)) for p in parts for row in p]


@pytest.mark.parametrize("make", [numbers, generated])
def test_an_iterator_replays_when_it_is_initialized(strategy, comm, make):
    iterator = strategy.make_dataset_iterator(make(30).batch(12))
    assert isinstance(iterator, mpidist.InputIterator)
    before = set(threading.enumerate())
    for _ in range(2):
        assert iterator.initialize() == []
        assert in_order(comm, drain(strategy, iterator)) == list(range(30))
        with pytest.raises(OutOfRangeError, match="after 3 steps"):
            iterator.get_next()
    iterator.initialize()
    first = local(strategy, iterator.get_next())
    iterator.initialize()
    assert local(strategy, iterator.get_next()) == first
    iterator.close()
    assert set(threading.enumerate()) <= before


def test_an_iterator_initializes_itself(strategy, comm):
    iterator = strategy.make_dataset_iterator(numbers(12).batch(12))
    assert in_order(comm, drain(strategy, iterator)) == list(range(12))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [numbers, generated])
def test_batches_that_cannot_be_divided_are_refused(strategy, comm, make):
    with pytest.raises(ValueError, match="make_input_fn_iterator"):
        strategy.make_dataset_iterator(make(30).batch(comm.size + 1))
    with pytest.raises(ValueError, match=r"make_dataset_iterator.*call batch\("):
        strategy.make_dataset_iterator(make(30))
    require_usable(strategy)


def test_plain_batches_are_divided(strategy, comm):
    iterator = strategy.make_dataset_iterator([np.arange(12), np.arange(12, 24)])
    assert in_order(comm, drain(strategy, iterator)) == list(range(24))


def test_a_dataset_of_an_input_function_is_taken_as_it_is(strategy, comm):
    told = []

    def input_fn(ctx):
        told.append(ctx)
        rows = numbers(22).shard(ctx.num_input_pipelines, ctx.input_pipeline_id)
        return rows.batch(ctx.get_per_replica_batch_size(12))

    iterator = strategy.make_input_fn_iterator(input_fn)
    rows = list(range(22))[comm.rank :: comm.size]
    for _ in range(2):
        assert iterator.initialize() == []
        assert joined(drain(strategy, iterator)) == rows
    assert told == [mpidist.InputContext(comm.size, comm.rank, comm.size)]


def test_batches_of_an_input_function_are_taken_as_they_are(strategy, comm):
    def input_fn(ctx):
        return [np.arange(3) + i for i in range(ctx.input_pipeline_id + 1)]

    def as_generator(ctx):
        def generate():
            yield from input_fn(ctx)

        return generate

    for fn in (input_fn, as_generator):
        iterator = strategy.make_input_fn_iterator(fn)
        expected = [[i, i + 1, i + 2] for i in range(comm.rank + 1)]
        expected += [[]] * (comm.size - comm.rank - 1)
        for _ in range(2):
            iterator.initialize()
            assert drain(strategy, iterator) == expected


def test_a_function_is_called_once_for_each_batch(strategy, comm):
    calls, made = [], []

    def input_fn(ctx):
        made.append(ctx)
        batches = iter([np.full(2, i) for i in range(3)])

        def next_batch():
            calls.append(threading.current_thread())
            return next(batches)

        return next_batch

    iterator = strategy.make_input_fn_iterator(input_fn)
    assert (len(made), len(calls)) == (1, 0)
    for i in range(3):
        assert local(strategy, iterator.get_next()) == [i, i]
        assert len(calls) == i + 1
    for _ in range(2):
        with pytest.raises(OutOfRangeError):
            iterator.get_next()
    iterator.initialize()
    assert drain(strategy, iterator) == [[0, 0], [1, 1], [2, 2]]
    assert len(made) == 2
    assert set(calls) == {threading.current_thread()}


def test_a_function_may_go_on_for_ever(strategy):
    iterator = strategy.make_input_fn_iterator(lambda ctx: lambda: np.arange(2))
    assert [local(strategy, iterator.get_next()) for _ in range(3)] == [[0, 1]] * 3
    iterator.close()


@pytest.mark.parametrize("made", [3, None, "abc", {"x": 1}])
def test_an_input_function_must_return_a_dataset_or_a_function(strategy, comm, made):
    last = comm.size - 1
    with pytest.raises(ValueError, match="input_fn must return"):
        strategy.make_input_fn_iterator(
            lambda ctx: made if ctx.input_pipeline_id == last else numbers(4).batch(2),
        )
    require_usable(strategy)


def test_other_replication_modes_are_refused(strategy):
    with pytest.raises(ValueError, match="replication_mode"):
        strategy.make_input_fn_iterator(
            lambda ctx: numbers(4).batch(2),
            InputReplicationMode.PER_REPLICA,
        )
    require_usable(strategy)


def test_what_functions_raise_on_one_replica_is_raised_on_all(strategy, comm):
    def fail(ctx):
        if ctx.input_pipeline_id == ctx.num_input_pipelines - 1:
            raise KeyError(MESSAGE)
        return numbers(4).batch(2)

    def fail_later(ctx):
        def next_batch():
            if ctx.input_pipeline_id == 0:
                raise KeyError(MESSAGE)
            return np.arange(2)

        return next_batch

    with pytest.raises(KeyError, match=MESSAGE):
        strategy.make_input_fn_iterator(fail)
    iterator = strategy.make_input_fn_iterator(fail_later)
    with pytest.raises(KeyError, match=MESSAGE):
        iterator.get_next()
    iterator.initialize()
    with pytest.raises(KeyError, match=MESSAGE):
        iterator.get_next()
    require_usable(strategy)


@pytest.mark.parametrize("make", [numbers, generated])
def test_batches_as_optionals(strategy, make):
    iterator = iter(strategy.experimental_distribute_dataset(make(8).batch(4)))
    total = 0
    while (batch := iterator.get_next_as_optional()).has_value():
        total += strategy.reduce("SUM", batch.get_value(), axis=0)
    assert total == 28
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(ValueError, match="no value"):
        batch.get_value()
    assert repr(batch) == "Optional()"


def test_the_end_is_an_out_of_range_error_and_a_stop(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(numbers(8).batch(4)))
    iterator.get_next(), iterator.get_next()
    with pytest.raises(OutOfRangeError, match="after 2 steps") as caught:
        iterator.get_next()
    assert isinstance(caught.value, StopIteration | mpidist.MpidistError)
    with pytest.raises(StopIteration) as stopped:
        next(iterator)
    assert type(stopped.value) is StopIteration


@pytest.mark.parametrize("name", ["get_next", "get_next_as_optional"])
def test_asking_inside_a_replica_function_is_refused(strategy, name):
    iterator = iter(strategy.experimental_distribute_dataset(numbers(8).batch(4)))
    with pytest.raises(ValueError, match="inside a replica function"):
        strategy.run(getattr(iterator, name))
    require_usable(strategy)
