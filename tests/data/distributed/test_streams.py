"""Generators divided over replicas: nobody waits for one that ended, no row is lost."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
import pytest
from all_ranks import in_order, local, on_all_ranks, require_usable
from datasets import generated, reading_ahead

import mpidist
from mpidist import Dataset

MESSAGE = "damaged on purpose"
PREFETCH = pytest.mark.parametrize("prefetch", [0, 1, 3])


# Global batches


@pytest.mark.parametrize("as_function", [False, True])
def test_plain_batches_are_divided(strategy, comm, as_function):
    sizes = [5, 1, 7, 4]
    ends = np.cumsum(sizes)
    rows = np.arange(17, dtype=np.int32)
    batches = [
        {"x": rows[e - n : e], "y": rows[e - n : e, None]} for n, e in zip(sizes, ends)
    ]
    source = (lambda: iter(batches)) if as_function else batches
    divided = strategy.experimental_distribute_dataset(source)
    for _ in range(2):
        found = list(divided)
        x = on_all_ranks(strategy, comm, [batch["x"] for batch in found])
        assert in_order(x) == rows.tolist()
        for size, parts in zip(sizes, x):
            share = -(-size // comm.size)
            assert [len(p) for p in parts] == [
                max(0, min(share, size - r * share)) for r in range(comm.size)
            ]
            assert {p.dtype for p in parts} == {np.dtype(np.int32)}
        y = on_all_ranks(strategy, comm, [batch["y"] for batch in found])
        assert {p.shape[1:] for parts in y for p in parts} == {(1,)}


@pytest.mark.mpi(min_size=2)
@PREFETCH
def test_global_batches_that_end_on_one_replica_are_an_error_on_all(
    strategy, comm, prefetch
):
    dataset = generated(12 - 4 * (comm.rank == 1)).batch(4)
    iterator = iter(
        strategy.experimental_distribute_dataset(dataset, reading_ahead(prefetch))
    )
    for _ in range(2):
        next(iterator)
    with pytest.raises(mpidist.MismatchError, match=r"missing, as.* ended on rank 1"):
        next(iterator)
    for _ in range(2):
        with pytest.raises(mpidist.DataError, match="iterate over the dataset again"):
            next(iterator)
    require_usable(strategy)


UNLIKE = {
    "dtype": lambda odd: np.zeros(4, np.float32 if odd else np.float64),
    "dimensions": lambda odd: np.zeros((4, 2) if odd else 4),
    "structure": lambda odd: {"b" if odd else "a": np.zeros(4)},
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("batch", [*UNLIKE.values(), lambda odd: np.zeros(4 + odd)])
def test_unlike_global_batches_are_an_error_on_all(strategy, comm, batch):
    divided = strategy.experimental_distribute_dataset([batch(comm.rank == 1)])
    with pytest.raises(mpidist.MismatchError, match="on rank 1"):
        next(iter(divided))
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_a_generator_and_files_do_not_go_together(strategy, comm):
    dataset = generated(4) if comm.rank == 1 else Dataset.range(4)
    with pytest.raises(mpidist.MismatchError, match="dataset is"):
        strategy.experimental_distribute_dataset(dataset.batch(2))
    require_usable(strategy)


@pytest.mark.parametrize(
    "later",
    [
        np.zeros(4, np.float32),
        np.zeros((4, 1)),
        {"x": np.zeros(4)},
    ],
)
def test_batches_that_change_are_refused(strategy, later):
    divided = strategy.experimental_distribute_dataset([np.zeros(4), later])
    with pytest.raises(mpidist.DataError, match="must be alike"):
        list(divided)
    require_usable(strategy)


def test_single_elements_and_other_things_are_refused(strategy):
    with pytest.raises(ValueError, match=r"call batch\("):
        strategy.experimental_distribute_dataset(generated(4))
    batches = [np.arange(4)]
    once, divided = iter(batches), strategy.experimental_distribute_dataset(batches)
    with pytest.raises(ValueError, match="pass the function"):
        strategy.experimental_distribute_dataset(once)
    for value in ((np.arange(4),), {"x": np.arange(4)}, "abc", 3):
        with pytest.raises(TypeError, match=r"mpidist\.Dataset"):
            strategy.experimental_distribute_dataset(value)
    for value in (divided, iter(divided)):
        with pytest.raises(TypeError, match="distributed already"):
            strategy.experimental_distribute_dataset(value)
    require_usable(strategy)


# Batches per replica


@PREFETCH
@pytest.mark.parametrize("trailing", [(), (3, 2)])
def test_replicas_that_run_out_get_batches_without_rows(
    strategy, comm, prefetch, trailing
):
    def make(ctx):
        def generate():
            for i in range(2 * ctx.input_pipeline_id):
                yield {
                    "x": np.full((2, *trailing), 10 * ctx.input_pipeline_id + i, "i2")
                }

        return generate

    divided = strategy.distribute_datasets_from_function(make, reading_ahead(prefetch))
    for _ in range(2):
        steps = on_all_ranks(strategy, comm, [batch["x"] for batch in divided])
        assert len(steps) == 2 * (comm.size - 1)
        for i, parts in enumerate(steps):
            for rank, part in enumerate(parts):
                assert part.dtype == np.int16
                assert part.shape == (2 if i < 2 * rank else 0, *trailing)
                assert (part == 10 * rank + i).all()


def test_no_replica_has_batches(strategy):
    divided = strategy.distribute_datasets_from_function(lambda ctx: [])
    for _ in range(2):
        assert list(divided) == []
    with pytest.raises(mpidist.OutOfRangeError):
        iter(divided).get_next()


def test_no_rows_take_the_shape_of_the_own_last_batch(strategy, comm):
    def make(ctx):
        if ctx.input_pipeline_id == 0:
            return [np.zeros((1, 4)), np.zeros((1, 7))]
        return [np.zeros((1, 2))] * 3

    divided = strategy.distribute_datasets_from_function(make)
    steps = [local(strategy, batch).shape for batch in divided]
    if comm.rank == 0:
        assert steps == [(1, 4), (1, 7), (0, 7)][: 2 if comm.size == 1 else 3]
    else:
        assert steps == [(1, 2)] * 3


@pytest.mark.mpi(min_size=2)
def test_single_elements_of_unequal_number_are_an_error_on_all(strategy):
    divided = strategy.distribute_datasets_from_function(
        lambda ctx: generated(3 - (ctx.input_pipeline_id == 1))
    )
    with pytest.raises(mpidist.MismatchError, match=r"rank 1 has ended.*call batch"):
        list(divided)
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("batch", UNLIKE.values())
def test_unlike_batches_are_an_error_on_all(strategy, batch):
    divided = strategy.distribute_datasets_from_function(
        lambda ctx: [batch(ctx.input_pipeline_id == 1)]
    )
    with pytest.raises(mpidist.MismatchError, match="on rank 1"):
        next(iter(divided))
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_a_structure_that_cannot_be_sent_is_an_error_only_where_it_is_needed(
    strategy, comm
):
    class Local(NamedTuple):
        x: np.ndarray

    def make(ctx, least):
        return [Local(np.zeros(2))] * (least + ctx.input_pipeline_id)

    divided = strategy.distribute_datasets_from_function(lambda ctx: make(ctx, 1))
    assert len(list(divided)) == comm.size
    divided = strategy.distribute_datasets_from_function(lambda ctx: make(ctx, 0))
    with pytest.raises(mpidist.DataError, match=r"rank 0 has no more batches.*pickled"):
        list(divided)
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["global", "own"])
def test_replicas_that_are_out_of_step_are_an_error_on_all(strategy, comm, kind):
    def divide():
        if kind == "global":
            return strategy.experimental_distribute_dataset([np.zeros(4)] * 3)
        return strategy.distribute_datasets_from_function(lambda ctx: [np.zeros(4)] * 3)

    one, two, three = divide(), divide(), divide()
    with pytest.raises(mpidist.MismatchError, match="on rank"):
        next(iter(one if comm.rank == 1 else two))
    if comm.rank == 0:
        iter(three).close()
    with pytest.raises(mpidist.MismatchError, match="on rank"):
        next(iter(three))
    require_usable(strategy)


# Failures and threads


@PREFETCH
@pytest.mark.parametrize("is_global", [True, False])
def test_what_a_generator_raises_on_one_replica_is_raised_on_all(
    strategy, comm, prefetch, is_global
):
    failing = comm.size - 1

    def generate():
        yield np.arange(4)
        if comm.rank == failing:
            raise KeyError(MESSAGE)
        yield np.arange(4)

    if is_global:
        divided = strategy.experimental_distribute_dataset(
            generate, reading_ahead(prefetch)
        )
    else:
        divided = strategy.distribute_datasets_from_function(
            lambda ctx: generate, reading_ahead(prefetch)
        )
    before = set(threading.enumerate())
    iterator = iter(divided)
    next(iterator)
    with pytest.raises(KeyError, match=MESSAGE) as caught:
        next(iterator)
    assert comm.size == 1 or caught.value.origin_rank == failing
    with pytest.raises(mpidist.DataError, match="iterate over the dataset again"):
        next(iterator)
    assert set(threading.enumerate()) <= before
    require_usable(strategy)


@pytest.mark.parametrize("is_global", [True, False])
def test_a_loop_that_is_broken_off_leaves_no_thread_and_no_open_generator(
    strategy, is_global
):
    closed = []

    def generate():
        try:
            for _ in range(100):
                yield np.arange(4)
        finally:
            closed.append(True)

    if is_global:
        divided = strategy.experimental_distribute_dataset(generate)
    else:
        divided = strategy.distribute_datasets_from_function(lambda ctx: generate)
    before = set(threading.enumerate())
    for _ in divided:
        left = set(threading.enumerate()) - before
        break
    assert left
    for reader in left:
        reader.join(600)
    assert not set(threading.enumerate()) - before
    assert closed == [True]
    iterator = iter(divided)
    next(iterator)
    iterator.close()
    assert not set(threading.enumerate()) - before
    assert closed == [True, True]


@pytest.mark.parametrize("step", ["take", "shuffle", "repeat", "map"])
def test_generators_behind_steps_are_closed_too(strategy, step):
    closed = []

    def generate():
        try:
            yield from range(100)
        finally:
            closed.append(True)

    argument = (lambda x: x) if step == "map" else 50
    dataset = getattr(Dataset.from_generator(generate), step)(argument).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    next(iterator)
    iterator.close()
    assert closed == [True]


@pytest.mark.parametrize("source", [generated, Dataset.range])
def test_a_step_is_one_agreement_whatever_the_lengths(strategy, comm, source):
    """At most; those of a range are agreed on several at a time."""
    consensus = strategy.extended.consensus
    is_known = source is Dataset.range
    for own, divided in enumerate(
        (
            strategy.experimental_distribute_dataset(source(8).batch(2)),
            strategy.distribute_datasets_from_function(
                lambda ctx: source(8 - ctx.input_pipeline_id).batch(2)
            ),
        )
    ):
        iterator = iter(divided)
        for step in range(4):
            calls = consensus.calls
            next(iterator)
            made = consensus.calls - calls
            # Ranks from 2 on have ended, and agree once more on a batch without rows
            ended = own and not is_known and step == 3 and comm.size > 2
            assert made == (comm.size > 1) + ended or (is_known and made == 0)
        calls = consensus.calls
        assert list(iterator) == []
        assert consensus.calls == calls + (comm.size > 1 and not is_known)
        assert list(iterator) == []


def test_the_default_strategy_gives_bare_batches_and_others_do_not(comm):
    from mpi4py import MPI

    alone = mpidist.MirroredStrategy(communicator=MPI.COMM_SELF)
    for strategy in (mpidist.get_strategy(), alone):
        for divided in (
            strategy.experimental_distribute_dataset([np.arange(3)] * 2),
            strategy.distribute_datasets_from_function(lambda ctx: [np.arange(3)] * 2),
        ):
            batches = list(divided)
            if strategy is alone:
                batches = [batch.values[0] for batch in batches]
            assert [batch.tolist() for batch in batches] == [[0, 1, 2]] * 2
    alone.experimental_finalize()
