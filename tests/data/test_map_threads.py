"""Maps in several threads: at the same time, in order, and no thread left."""

import functools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from all_ranks import require_usable, rows_in_order
from datasets import generated, lists, numbers, require_no_new_threads

import mpidist
from mpidist import Dataset, InputOptions
from mpidist.util.threads import share_calls

MESSAGE = "damaged on purpose"


class Meeting:
    """A function that returns only when two threads are in it at the same time."""

    def __init__(self):
        self._barrier = threading.Barrier(2)
        self.threads = set()

    def __call__(self, x):
        self._barrier.wait(600)
        self.threads.add(threading.current_thread().name)
        return x + 1


# One process


@pytest.mark.parametrize(
    "build",
    [
        lambda meet: numbers(8).map(meet, num_parallel_calls=2),
        lambda meet: generated(8).map(meet, num_parallel_calls=2),
        lambda meet: numbers(8).map(meet, num_parallel_calls=2).batch(4),
        lambda meet: numbers(8).batch(2).map(meet, num_parallel_calls=2),
        lambda meet: numbers(8).batch(2).map(meet, 2).prefetch(1),
    ],
)
def test_two_calls_run_at_the_same_time(build):
    meet = Meeting()
    rows = np.concatenate([np.atleast_1d(x) for x in build(meet)])
    assert rows.tolist() == list(range(1, 9))
    assert len(meet.threads) > 1
    assert all(name.startswith("mpidist-") for name in meet.threads)


def test_a_call_that_was_cancelled_holds_nothing():
    """The only thread of the pool is busy until the end."""

    class Thing:
        pass

    thing, begun, go = Thing(), threading.Event(), threading.Event()
    gone = weakref.ref(thing)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: (begun.set(), go.wait(600)))
        assert begun.wait(600)
        add = functools.partial(lambda thing, i: i + 1, thing)
        assert share_calls(add, [1, 2, 3], pool, 1) == [2, 3, 4]
        del add, thing
        assert gone() is None
        go.set()


@pytest.mark.parametrize("source", [numbers, generated])
@pytest.mark.parametrize("batch_first", [False, True])
def test_the_first_failure_in_order_is_raised(source, batch_first):
    def fail(x):
        if np.max(x) >= 5:
            raise KeyError(int(np.min(x)))
        return x

    before = threading.enumerate()
    serial, parallel = [], []
    for seen, count in ((serial, None), (parallel, 3)):
        dataset = source(12)
        if batch_first:
            dataset = dataset.batch(2).map(fail, count)
        else:
            dataset = dataset.map(fail, count)
        with pytest.raises(KeyError) as caught:
            seen.extend(dataset)
        seen.append(caught.value.args)
    assert lists(serial) == lists(parallel)
    assert serial[-1] == parallel[-1]
    require_no_new_threads(before)


def test_the_first_failure_in_a_batch_is_raised():
    def fail(x):
        if x % 4 == 3:
            raise KeyError(int(x))
        return x

    for _ in range(20):
        with pytest.raises(KeyError, match="3"):
            list(numbers(64).map(fail, 4).batch(64))


@pytest.mark.parametrize("source", [numbers, generated])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_that_is_broken_off_leaves_no_thread_behind(source, prefetch):
    before = threading.enumerate()
    for x in source(50).map(lambda x: x, 3).prefetch(prefetch):
        if x == 4:
            break
    require_no_new_threads(before)


def test_an_endless_dataset_is_read_a_few_elements_ahead_only():
    calls = []
    endless = numbers(3).repeat().map(lambda x: calls.append(x) or x, 2)
    iterator = iter(endless)
    assert [int(next(iterator)) for _ in range(5)] == [0, 1, 2, 0, 1]
    iterator.close()
    assert len(calls) <= 5 + 2


# Divided over replicas


def test_steps_are_mapped_at_the_same_time(strategy, comm):
    meet = Meeting()
    n = comm.size
    dataset = numbers(8 * n).batch(2 * n).map(meet, num_parallel_calls=2)
    divided = strategy.experimental_distribute_dataset(dataset)
    assert rows_in_order(strategy, comm, divided) == list(range(1, 8 * n + 1))
    assert len(meet.threads) == 2


def test_rows_of_a_batch_are_mapped_at_the_same_time(strategy, comm):
    meet = Meeting()
    n = comm.size
    dataset = numbers(8 * n).map(meet, num_parallel_calls=2).batch(4 * n)
    options = InputOptions(experimental_per_replica_buffer_size=0)
    divided = strategy.experimental_distribute_dataset(dataset, options)
    assert rows_in_order(strategy, comm, divided) == list(range(1, 8 * n + 1))
    assert all(name.startswith("mpidist-map") for name in meet.threads)


def test_a_generator_is_read_in_one_thread(strategy, comm):
    readers = set()

    def rows():
        for i in range(12):
            readers.add(threading.current_thread())
            yield np.int64(i)

    meet = Meeting()
    dataset = Dataset.from_generator(rows).map(meet, num_parallel_calls=2).batch(3)
    before = threading.enumerate()
    divided = strategy.experimental_distribute_dataset(dataset)
    assert rows_in_order(strategy, comm, divided) == list(range(1, 13))
    assert len(readers) == 1
    require_no_new_threads(before)


def test_reading_ahead_is_bounded(strategy, comm):
    steps = []
    n = comm.size

    def note(x):
        steps.append(int(x[0]) // n)
        return x

    dataset = numbers(40 * n).batch(n).map(note, num_parallel_calls=3)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    for step in range(10):
        next(iterator)
        assert max(steps) <= step + 3
    iterator.close()
    assert max(steps) <= 9 + 3


@pytest.mark.parametrize("batch_first", [False, True], ids=["rows", "batches"])
@pytest.mark.parametrize("source", [numbers, generated])
def test_a_failure_on_one_rank_is_raised_on_all(strategy, batch_first, source):
    def fail(x):
        if (np.asarray(x) == 19).any():
            raise KeyError(MESSAGE)
        return x

    def build(n):
        rows = source(32)
        return rows.batch(8).map(fail, n) if batch_first else rows.map(fail, n).batch(8)

    before = threading.enumerate()
    iterator = iter(strategy.experimental_distribute_dataset(build(3)))
    next(iterator)
    next(iterator)
    for _ in range(2):  # a step can be tried again, a generator cannot
        with pytest.raises((KeyError, mpidist.DataError), match=MESSAGE):
            next(iterator)
    require_usable(strategy)
    iterator.close()
    require_no_new_threads(before)
