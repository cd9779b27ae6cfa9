"""States of iterators: restored at every step, at the same and at other rank counts.

What the rows must be is known without mpidist (NumPy, h5py, ranges); in which order a
shuffle brings them, from a run that nobody interrupted.
"""

from __future__ import annotations

import itertools
import json
import pickle
import threading
from typing import NamedTuple

import h5py
import numpy as np
import pytest
from all_ranks import require_usable
from datasets import generated, reading_ahead, with_policy
from mpi4py import MPI

import mpidist
from mpidist import AutoShardPolicy, Dataset, Options
from mpidist.data.sharding import Permutation
from mpidist.data.sources import RangeRows
from mpidist.util import nest

MESSAGE = "damaged on purpose"
PREFETCH = pytest.mark.parametrize("prefetch", [0, 1, 3])


# Data


numbers = Dataset.range


def write(folder, counts, start=0):
    """Write files of so many rows each, numbered on from `start`; return the paths."""
    folder.mkdir(exist_ok=True)
    ends = start + np.cumsum(counts)
    for i, (count, end) in enumerate(zip(counts, ends)):
        with h5py.File(folder / f"{i}.h5", "w") as file:
            file["x"] = np.arange(end - count, end)
            file["y"] = np.arange(end - count, end)[:, None] * [1.0, 2.0]
    return [folder / f"{i}.h5" for i in range(len(counts))]


@pytest.fixture
def files(comm, mpi_tmp_path):
    """A function like `write` that all ranks call."""

    def make(counts, folder="data", start=0):
        if comm.rank == 0:
            write(mpi_tmp_path / folder, counts, start)
        comm.Barrier()
        return [mpi_tmp_path / folder / f"{i}.h5" for i in range(len(counts))]

    return make


def of_files(paths):
    return Dataset.from_hdf5(paths, {"x": "x", "y": "y"})


# Runs


class Run(NamedTuple):
    """An epoch without interruption."""

    steps: list  # lists of numbers, in global order
    states: list  # before each step, and after the last one


def whole(strategy, batch):
    """All replicas' rows of a batch, of all leaves, as lists."""
    gathered = strategy.gather(batch, axis=0)
    return [leaf.tolist() for leaf in nest.flatten(gathered)[0]]


def run(strategy, iterator, limit=None):
    """Go on to the end, or to step `limit` of the epoch; close the iterator."""
    steps, states = [], [iterator.get_state()]
    while states[-1]["step"] != limit:
        batch = iterator.get_next_as_optional()
        if not batch.has_value():
            break
        steps.append(whole(strategy, batch.get_value()))
        states.append(iterator.get_state())
    iterator.close()
    return Run(steps, states)


@pytest.fixture
def strategies(comm):
    """Strategies over the first k ranks, by k; None on the ranks beyond."""
    made = {}
    for k in range(1, comm.size + 1):
        part = comm.Split(0 if comm.rank < k else MPI.UNDEFINED, comm.rank)
        made[k] = None
        if part != MPI.COMM_NULL:
            made[k] = mpidist.MirroredStrategy(communicator=part)
            part.Free()
    yield made
    for strategy in filter(None, made.values()):
        strategy.experimental_finalize()


ENDLESS = numbers(8).shuffle().repeat().batch(4), 8
PLAIN = [np.arange(3), np.arange(3, 4), np.arange(4, 9)], None


@PREFETCH
@pytest.mark.parametrize(("batches", "limit"), [ENDLESS, PLAIN], ids=["endless", ""])
def test_other_batches_go_on_at_every_step(strategy, batches, limit, prefetch):
    """The other kinds: tests/fuzz/rows.py."""
    options, before = reading_ahead(prefetch), set(threading.enumerate())
    divided = strategy.experimental_distribute_dataset(batches, options)
    expected, iterator = run(strategy, iter(divided), limit), iter(divided)
    for i in reversed(range(len(expected.states))):
        iterator.set_state(expected.states[i])
        rest = run(strategy, iterator, limit)
        assert rest == (expected.steps[i:], expected.states[i:])
        assert set(threading.enumerate()) <= before


# The state itself


def test_a_state_is_a_small_dict_of_integers(strategy, comm):
    dataset = numbers(23).shuffle().batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    next(iterator), next(iterator)
    state = iterator.get_state()
    assert (state["version"], state["epoch"], state["step"]) == (1, 0, 2)
    assert len(state) < 12
    assert {type(value) for value in state.values()} == {int}
    assert all(abs(value) < 1 << 63 for value in state.values())
    assert json.loads(json.dumps(state)) == pickle.loads(pickle.dumps(state)) == state
    assert comm.allgather(state) == [state] * comm.size
    rest = [whole(strategy, batch) for batch in iterator]
    iterator.set_state(json.loads(json.dumps(state)))
    assert [whole(strategy, batch) for batch in iterator] == rest
    iterator.set_state({name: np.int64(value) for name, value in state.items()})
    assert iterator.get_state() == state
    assert {type(value) for value in iterator.get_state().values()} == {int}


def test_a_state_is_not_changed_by_what_comes_after(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(numbers(9).batch(3)))
    state = iterator.get_state()
    copy = dict(state)
    next(iterator)
    assert state == copy
    iterator.set_state(state)
    state["step"] = 2
    assert iterator.get_state() == copy


@pytest.mark.parametrize("make", [numbers, generated])
def test_the_last_state_is_the_end_and_the_first_the_beginning(strategy, make):
    divided = strategy.experimental_distribute_dataset(make(9).batch(4))
    first = iter(divided).get_state()
    last = run(strategy, iter(divided)).states[-1]
    iterator = iter(divided)
    for _ in range(2):
        iterator.set_state(last)
        for _ in range(2):
            with pytest.raises(mpidist.OutOfRangeError, match="after 3 steps"):
                iterator.get_next()
        assert iterator.get_state() == last
        iterator.set_state(first)
        assert len(list(iterator)) == 3


class Reads:
    """Counts what is read of ranges."""

    def __init__(self, monkeypatch):
        self.rows = []
        read = RangeRows.read

        def count(source, rows):
            self.rows.extend(rows.tolist())
            return read(source, rows)

        monkeypatch.setattr(RangeRows, "read", count)


@pytest.mark.parametrize("step", [0, 123_456_789, 999_999_999, 10**9])
def test_seeking_reads_nothing_but_the_step(strategy, comm, monkeypatch, step):
    reads = Reads(monkeypatch)
    dataset = Dataset.range(10**12).shuffle(seed=1).batch(1000)
    order = Permutation(10**12, seed=1)
    divided = strategy.experimental_distribute_dataset(dataset, reading_ahead(0))
    for iterator in (iter(divided), iter(dataset)):
        iterator.set_state(iterator.get_state() | {"step": step})
        assert reads.rows == []
        batch = next(iterator, None)
        if step == 10**9:
            assert batch is None
            assert reads.rows == []
            continue
        (mine,) = strategy.experimental_local_results(batch)
        assert reads.rows == mine.tolist()
        expected = order(np.arange(step * 1000, step * 1000 + 1000))
        if iterator.get_state()["step"] == step + 1 and len(mine) == 1000:
            assert mine.tolist() == expected.tolist()
        else:
            assert whole(strategy, batch) == [expected.tolist()]
        reads.rows.clear()


# States that do not fit


BAD = {
    "no dict": (lambda s: [1], TypeError, "get_state returned"),
    "None": (lambda s: None, TypeError, "get_state returned"),
    "empty": (lambda s: {}, ValueError, "version is None"),
    "a later version": (lambda s: s | {"version": 2}, ValueError, "version is 2"),
    "less": (lambda s: {k: s[k] for k in s if k != "step"}, ValueError, "in step"),
    "more": (lambda s: s | {"rank": 1}, ValueError, "differs in rank"),
    "a fraction": (lambda s: s | {"step": 1.0}, TypeError, "step must be an integer"),
    "negative": (lambda s: s | {"step": -1}, ValueError, r"step must be in 0\.\."),
    "large": (lambda s: s | {"entropy": 1 << 63}, ValueError, "entropy must be in"),
    "past the end": (lambda s: s | {"step": 4}, ValueError, "an epoch has 3 steps"),
    "other data": (lambda s: s | {"source": 1}, ValueError, "its rows are not those"),
    "another": (lambda s: s | {"dataset": 1}, ValueError, "its steps are not those"),
}


@pytest.mark.parametrize(("spoil", "error", "message"), BAD.values(), ids=list(BAD))
@pytest.mark.parametrize("everywhere", [False, True])
def test_a_bad_state_of_one_rank_is_an_error_on_all_and_changes_nothing(
    strategy, comm, spoil, error, message, everywhere
):
    divided = strategy.experimental_distribute_dataset(numbers(9).batch(4))
    iterator = iter(divided)
    next(iterator)
    state = iterator.get_state()
    is_bad = everywhere or comm.rank == comm.size - 1
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            iterator.set_state(spoil(state) if is_bad else state)
        assert isinstance(caught.value, mpidist.MpidistError)
        assert iterator.get_state() == state
    assert [whole(strategy, batch) for batch in iterator] == [[[4, 5, 6, 7]], [[8]]]
    assert iter(divided).get_state()["epoch"] == 1
    require_usable(strategy)


@pytest.mark.parametrize(("spoil", "error", "message"), BAD.values(), ids=list(BAD))
def test_a_bad_state_does_not_change_a_local_iterator(spoil, error, message):
    iterator = iter(numbers(9).batch(4).prefetch(1))
    next(iterator)
    with pytest.raises(error, match=message):
        iterator.set_state(spoil(iterator.get_state()))
    assert [batch.tolist() for batch in iterator] == [[4, 5, 6, 7], [8]]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["epoch", "step", "entropy"])
def test_unlike_states_are_an_error_on_all_ranks(strategy, comm, name):
    divided = strategy.experimental_distribute_dataset(numbers(9).shuffle().batch(4))
    iterator = iter(divided)
    first = whole(strategy, next(iterator))
    state = iterator.get_state()
    with pytest.raises(mpidist.MismatchError, match=f"{name} is .* on rank 0"):
        iterator.set_state(state | {name: 1 + (comm.rank == 0)})
    assert iterator.get_state() == state
    rest = [whole(strategy, batch) for batch in iterator]
    assert sorted(x for [b] in [first, *rest] for x in b) == list(range(9))
    require_usable(strategy)


OTHERS = {
    "batch size": (
        lambda f: of_files(f).batch(4),
        "its batch_size is 6, but here it is 4",
    ),
    "length": (
        lambda f: of_files(f).repeat(2).batch(6),
        "3 steps per epoch, but here there are 6",
    ),
    "shuffle": (lambda f: of_files(f).shuffle().batch(6), r"its steps are .*shuffle"),
    "map": (lambda f: of_files(f).batch(6).map(abs), r"its steps are .*map"),
    "fewer files": (lambda f: of_files(f[1:]).batch(6), r"its rows.*\['1.h5', '2.h5'"),
    "other order": (lambda f: of_files(f[::-1]).batch(6), r"its rows.*\['3.h5', "),
    "other columns": (lambda f: Dataset.from_hdf5(f, "x").batch(6), r"its rows.*18 "),
    "no files": (lambda f: numbers(18).batch(6), r"its rows.*range\(0, 18\) of int64"),
    "a generator": (lambda f: generated(18).batch(6), "its rows.*from_generator"),
    "OFF": (
        lambda f: (
            of_files(f)
            .batch(6)
            .with_options(Options(auto_shard_policy=AutoShardPolicy.OFF))
        ),
        r"divided over any number of replicas, but here they are read whole.*OFF",
    ),
}


@pytest.mark.parametrize(("build", "message"), OTHERS.values(), ids=list(OTHERS))
def test_a_state_of_another_dataset_is_refused_by_name(strategy, files, build, message):
    paths = files([5, 0, 2, 11])
    first = strategy.experimental_distribute_dataset(of_files(paths).batch(6))
    other = strategy.experimental_distribute_dataset(build(paths))
    iterator = iter(other)
    with pytest.raises(mpidist.ArgumentError, match=message):
        iterator.set_state(iter(first).get_state())
    require_usable(strategy)


def test_files_may_move_but_not_change(strategy, files):
    def divide(paths):
        return strategy.experimental_distribute_dataset(of_files(paths).batch(6))

    state = run(strategy, iter(divide(files([5, 2, 11])))).states[1]
    moved = iter(divide(files([5, 2, 11], "moved", start=100)))
    moved.set_state(state)
    assert whole(strategy, next(moved))[0] == list(range(106, 112))
    changed = iter(divide(files([4, 3, 11], "changed")))
    with pytest.raises(ValueError, match="its rows are not those of 18 rows"):
        changed.set_state(state)


def test_restoring_inside_a_replica_function_is_refused(strategy):
    iterator = iter(strategy.experimental_distribute_dataset(numbers(8).batch(4)))
    state = iterator.get_state()
    assert strategy.run(iterator.get_state) is not None
    with pytest.raises(ValueError, match=r"set_state was called.*inside a replica"):
        strategy.run(iterator.set_state, (state,))
    require_usable(strategy)


# Replicas with data of their own


def mine(strategy, batch):
    (part,) = strategy.experimental_local_results(batch)
    return part.tolist()


def run_own(strategy, iterator):
    steps, states = [], [iterator.get_state()]
    for batch in iterator:
        steps.append(mine(strategy, batch))
        states.append(iterator.get_state())
    return Run(steps, states)


def require_own_rest(strategy, comm, divide):
    """Restore every state at the same number of ranks; return the first epoch."""
    divided, other = divide(strategy), divide(strategy)
    epochs = [run_own(strategy, iter(divided)) for _ in range(3)]
    assert comm.allgather([e.states for e in epochs]) == (
        [[e.states for e in epochs]] * comm.size
    )
    for this, following in itertools.pairwise(epochs):
        for i, state in enumerate(this.states):
            iterator = iter(other)
            iterator.set_state(state)
            assert run_own(strategy, iterator) == (this.steps[i:], this.states[i:])
        assert run_own(strategy, iter(other)) == following
    return epochs[0]


def require_only_here(comm, strategies, divide, message):
    """States of all ranks are refused on fewer, by all."""
    state = iter(divide(strategies[comm.size])).get_state()
    for k, strategy in list(strategies.items())[:-1]:
        if strategy:
            iterator = iter(divide(strategy))
            with pytest.raises(mpidist.ArgumentError, match=message(comm.size, k)):
                iterator.set_state(state)
            require_usable(strategy)


def of_replicas(n, k):
    return f"of {n} replicas, each.*here they are of {k} replica.*AUTO or DATA fit"


def test_states_of_replicas_own_data_fit_as_many_ranks(strategy, comm, strategies):
    def divide(strategy):
        return strategy.distribute_datasets_from_function(
            lambda c: (generated if c.input_pipeline_id == 0 else numbers)(9).batch(2)
        )

    require_own_rest(strategy, comm, divide)
    require_only_here(comm, strategies, divide, of_replicas)


def test_own_files_go_on_at_the_same_number_of_ranks(strategy, comm, strategies, files):
    paths = files([5, 3, 0, 7])

    def divide(strategy, paths=paths):
        dataset = Dataset.from_hdf5(paths, "x").shuffle().batch(4)
        return strategy.experimental_distribute_dataset(with_policy(dataset, "FILE"))

    epoch = require_own_rest(strategy, comm, divide)
    rows = [x for batch in comm.allgather(epoch.steps) for b in batch for x in b]
    assert sorted(rows) == list(range(15))
    require_only_here(comm, strategies, divide, of_replicas)
    state = iter(divide(strategy)).get_state()
    changed = iter(divide(strategy, files([5, 3, 0, 6], "changed")))
    with pytest.raises(ValueError, match="its rows are not those of"):
        changed.set_state(state)


@pytest.mark.parametrize("make", [numbers, generated])
def test_everything_everywhere_goes_on_where_batches_are_equal(
    strategy, comm, strategies, make
):
    def divide(strategy, batch_size=12):
        dataset = with_policy(make(30).shuffle(8, seed=1).batch(batch_size), "OFF")
        return strategy.experimental_distribute_dataset(dataset)

    require_own_rest(strategy, comm, divide)

    def message(n, k):
        return (
            rf"batch_size is {12 // n}, but here it is {12 // k} \(AutoShardPolicy.OFF"
        )

    require_only_here(comm, strategies, divide, message)
    state = run_own(strategy, iter(divide(strategy, comm.size))).states[3]
    rest = []
    for k, other in strategies.items():
        if other:
            iterator = iter(divide(other, k))
            iterator.set_state(state)
            rest.append(run_own(other, iterator))
    assert all(r == rest[0] for r in rest)


def test_a_replica_that_has_ended_learns_what_batches_of_no_rows_look_like(
    strategy, comm
):
    def make(context):
        is_long = context.input_pipeline_id == context.num_input_pipelines - 1
        batches = [{"x": np.ones((2, 3), "f4")}] * (5 if is_long else 1)
        return mpidist.data.dataset.as_dataset(batches, "test")

    divided = strategy.distribute_datasets_from_function(make)
    iterator = iter(divided)
    iterator.set_state(iterator.get_state() | {"step": 3})
    for _ in range(2):
        (batch,) = strategy.experimental_local_results(next(iterator))
        is_last = comm.rank == comm.size - 1
        assert batch["x"].shape == (2 if is_last else 0, 3)
        assert batch["x"].dtype == np.float32
    with pytest.raises(StopIteration):
        next(iterator)


# Generators


@PREFETCH
def test_a_generator_that_yields_too_little_is_an_error_on_all(
    strategy, comm, prefetch
):
    lengths = [20]

    def generate():
        yield from range(lengths[0] if comm.rank == comm.size - 1 else 20)

    dataset = Dataset.from_generator(generate).batch(4)
    divided = strategy.experimental_distribute_dataset(dataset, reading_ahead(prefetch))
    expected = run(strategy, iter(divided))
    iterator = iter(divided)
    lengths[0] = 6
    with pytest.raises(mpidist.DataError, match=r"is after 4 steps.*end after"):
        iterator.set_state(expected.states[4])
    with pytest.raises(mpidist.DataError, match="cannot continue after an error"):
        next(iterator)
    lengths[0] = 20
    assert iter(divided).get_state()["epoch"] == 2  # as the state was not restored
    iterator.set_state(expected.states[4])
    assert run(strategy, iterator).steps == expected.steps[4:]


@PREFETCH
def test_a_generator_that_fails_is_an_error_on_all(strategy, comm, prefetch):
    failures = []

    def generate():
        for i in range(20):
            if i == 6 and failures and comm.rank == comm.size - 1:
                raise KeyError(failures.pop())
            yield i

    dataset = Dataset.from_generator(generate).batch(4)
    divided = strategy.experimental_distribute_dataset(dataset, reading_ahead(prefetch))
    expected = run(strategy, iter(divided))
    failures.append(MESSAGE)
    iterator = iter(divided)
    before = set(threading.enumerate())
    with pytest.raises(KeyError, match=MESSAGE):
        iterator.set_state(expected.states[3])
    assert set(threading.enumerate()) <= before
    with pytest.raises(mpidist.DataError, match="cannot continue after an error"):
        next(iterator)
    iterator.set_state(expected.states[3])
    assert run(strategy, iterator).steps == expected.steps[3:]
    require_usable(strategy)


@PREFETCH
def test_a_local_generator_that_fails_needs_another_state(prefetch):
    failing = [True]

    def generate():
        for i in range(20):
            if i == 6 and failing[0]:
                raise KeyError(MESSAGE)
            yield i

    dataset = Dataset.from_generator(generate).batch(4).prefetch(prefetch)
    iterator = iter(dataset)
    state = iterator.get_state()
    with pytest.raises(KeyError, match=MESSAGE):
        list(iterator)
    assert iterator.get_state() == state | {"step": 1}
    with pytest.raises(KeyError, match=MESSAGE):
        iterator.set_state(state | {"step": 3})
    for _ in range(2):
        with pytest.raises(mpidist.DataError, match="cannot continue after an error"):
            next(iterator)
    failing[0] = False
    with pytest.raises(mpidist.DataError, match="ended after 5"):
        iterator.set_state(state | {"step": 6})
    iterator.set_state(state | {"step": 3})
    assert [batch.tolist() for batch in iterator] == [
        [12, 13, 14, 15],
        [16, 17, 18, 19],
    ]


@PREFETCH
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_of_a_local_iteration_loses_no_row(prefetch, error):
    failures = [error(MESSAGE)]

    def fail_once(x):
        if x == 5 and failures:
            raise failures.pop()
        return x

    iterator = iter(numbers(12).map(fail_once).batch(2).prefetch(prefetch))
    found = [next(iterator), next(iterator)]
    with pytest.raises(error, match=MESSAGE):
        next(iterator)
    assert iterator.get_state()["step"] == 2
    found += iterator
    assert np.concatenate(found).tolist() == list(range(12))


def test_going_on_does_not_start_a_generator_that_has_not_begun(strategy):
    started = []

    def generate():
        started.append(True)
        yield from range(8)

    divided = strategy.experimental_distribute_dataset(
        Dataset.from_generator(generate).batch(4), reading_ahead(0)
    )
    iterator = iter(divided)
    iterator.set_state(iterator.get_state())
    assert started == []
    next(iterator)
    iterator.set_state(iterator.get_state())
    assert len(started) == 2
    assert whole(strategy, next(iterator)) == [[4, 5, 6, 7]]
    iterator.close()


# TensorFlow 1's iterators


@pytest.mark.parametrize("make", [numbers, generated])
def test_iterators_of_tensorflow_1_go_on(strategy, make):
    def rest(iterator):
        steps = []
        while True:
            try:
                steps.append(whole(strategy, iterator.get_next()))
            except mpidist.OutOfRangeError:
                return steps

    iterator, other = (
        strategy.make_dataset_iterator(make(30).shuffle(9).batch(12)) for _ in range(2)
    )
    for _ in range(2):  # epochs
        iterator.get_next()
        state, expected = iterator.get_state(), rest(iterator)
        other.set_state(state)
        assert rest(other) == expected
        iterator.initialize()
    with pytest.raises(ValueError, match="version"):
        other.set_state({})
    iterator.close(), other.close()


def test_functions_that_return_batches_are_called_again(strategy):
    def input_fn(context):
        return iter([np.full(2, i) for i in range(4)]).__next__

    iterator = strategy.make_input_fn_iterator(input_fn)
    for _ in range(3):
        iterator.get_next()
    state = iterator.get_state()
    for _ in range(2):
        iterator.set_state(state)
        assert mine(strategy, iterator.get_next()) == [3, 3]
