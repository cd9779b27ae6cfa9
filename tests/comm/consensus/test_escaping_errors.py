"""Errors that come up anywhere in a public collective on one rank: all ranks raise."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading

import numpy as np
import pytest
from interruptions import Interrupt, interrupted

import mpidist
from mpidist.comm.consensus.consensus import Consensus
from mpidist.util import last_resort

context = mpidist.get_replica_context


def attempt(call):
    try:
        return call(), None
    except Exception as error:
        return None, error


def in_run(strategy, function):
    return strategy.run(function).values[0]


def step_of(strategy):
    """Return a function that makes a step with gradient buckets."""
    buckets = strategy.gradient_buckets([np.zeros(2)], "SUM")

    def step():
        with buckets:
            buckets.put(0, np.ones(2))
        return buckets.result[0]

    return lambda: in_run(strategy, step)


# Given a strategy, an array of ones and the number of ranks, a function returns another
# one whose result is that number
CALLS = {
    "reduce": lambda s, x, n: lambda: s.reduce("SUM", x),
    "reduce over an axis": lambda s, x, n: lambda: s.reduce("SUM", x[:1], axis=0),
    "gather": lambda s, x, n: lambda: len(s.gather(x, 0)) / len(x),
    "run": lambda s, x, n: lambda: in_run(s, lambda: n),
    "all_reduce": lambda s, x, n: (
        lambda: in_run(s, lambda: context().all_reduce("SUM", x))
    ),
    "merge_call": lambda s, x, n: (
        lambda: in_run(s, lambda: context().merge_call(lambda s: s.reduce("SUM", 1.0)))
    ),
    "broadcast": lambda s, x, n: lambda: s.broadcast(n),
    "gather_objects": lambda s, x, n: lambda: len(s.gather_objects(n)),
    "statistics_of": lambda s, x, n: lambda: s.statistics_of(x).mean * n,
    "gradient_buckets": lambda s, x, n: step_of(s),
}


def require_error_on_all(comm, strategy, call):
    """Require the right result on all ranks, or errors on all, now or in the next call.

    Returns whether the strategy can be used.
    """
    number = comm.size
    result, error = attempt(call)
    assert error is not None or np.all(np.asarray(result) == number)
    failed = comm.allgather(error is not None)
    total, later = attempt(lambda: strategy.reduce("SUM", 1.0))
    assert later is not None or total == number
    unusable = comm.allgather(later is not None)
    assert len(set(unusable)) == 1
    assert unusable[0] or len(set(failed)) == 1
    return not unusable[0]


@pytest.mark.parametrize("size", [3, 40_000])
@pytest.mark.parametrize("name", CALLS)
def test_an_exception_at_any_line(comm, make_strategy, name, size):
    lines = [1, 2, 4, 7, 12, 20, 33, 54, 90]
    strategy = make_strategy()
    call = CALLS[name](strategy, np.ones(size), comm.size)
    for number in lines:
        is_culprit = comm.rank == comm.size - 1
        injection = interrupted(number) if is_culprit else contextlib.nullcontext()

        def interrupted_call(injection=injection, call=call):
            with injection:
                return call()

        is_usable = require_error_on_all(comm, strategy, interrupted_call)
        # Before the ranks compare their calls, it is an error like any other
        assert is_usable or number > 7
        if not is_usable:
            strategy = make_strategy()
            call = CALLS[name](strategy, np.ones(size), comm.size)


class Closed(Exception):
    def __setattr__(self, name, value):
        raise KeyError(name)

    def __reduce__(self):
        return str, ("no exception",)


def test_an_exception_whose_class_fails(comm, strategy):
    """One of many such classes: the model of calls raises others."""

    def step():
        if comm.rank == comm.size - 1:
            raise Closed("mine")

    with pytest.raises(Closed if comm.rank == comm.size - 1 else Exception):
        strategy.run(step)
    assert strategy.reduce("SUM", 1.0) == comm.size


@pytest.mark.mpi(min_size=2)
def test_an_error_that_a_scope_swallows_is_not_forgotten(comm, strategy):
    """One rank lacks a result of its step, and says nothing."""

    def step():
        total = None
        with contextlib.suppress(Interrupt), contextlib.ExitStack() as stack:
            if comm.rank == 0:
                stack.enter_context(interrupted_after(strategy))
            total = context().all_reduce("SUM", np.ones(3))
        return total

    with pytest.raises(mpidist.CollectiveError):
        strategy.run(step)


@contextlib.contextmanager
def interrupted_after(strategy):
    """Raise when the lock of a collective has been released."""
    lock = strategy.extended.consensus.lock

    def at_event(frame, event, argument):
        if event == "return" and frame.f_code is type(lock).__exit__.__code__:
            sys.setprofile(None)
            raise Interrupt

    sys.setprofile(at_event)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_the_thread_that_made_a_strategy_has_ended(comm):
    made, found, names = [], {}, "abcd"
    maker = threading.Thread(
        target=lambda: made.append(mpidist.MirroredStrategy(communicator=comm))
    )
    maker.start()
    maker.join()
    start = threading.Barrier(len(names))

    def work(name):
        start.wait()
        found[name] = float(made[0].reduce("SUM", 10.0 ** ord(name)))

    threads = [threading.Thread(target=work, args=(n,), name=n) for n in names]
    for thread in threads if comm.rank else reversed(threads):
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: comm.size * 10.0 ** ord(n) for n in names}
    assert not made[0].extended.consensus.lock.is_creator()


@pytest.mark.mpi(min_size=2)
def test_broken_strategies_that_all_ranks_dropped_are_forgotten(comm, make_strategy):
    make_strategy()
    before = list(Consensus.in_use)
    for _ in range(3):
        strategy = mpidist.MirroredStrategy(communicator=comm)
        strategy.gradient_buckets([np.zeros(3)])
        with contextlib.suppress(KeyError), strategy.extended.consensus.call("x") as c:
            c.agree()
            comm.Barrier()
            if comm.rank == 0:
                raise KeyError
        with pytest.raises(mpidist.CollectiveError):
            strategy.reduce("SUM", 1.0)
        del strategy, c
        gc.collect()
    last = make_strategy()
    assert last.reduce("SUM", 1.0) == comm.size
    assert [c for c in Consensus.in_use if c not in before] == [last.extended.consensus]


@pytest.mark.parametrize("name", ["reduce", "gather", "reduce over an axis"])
def test_small_results_have_memory_of_their_own(comm, strategy, monkeypatch, name):
    """After the ranks have agreed, no rank may lack memory for a small result."""
    call = CALLS[name](strategy, np.ones(3), comm.size)
    call()
    if comm.rank == comm.size - 1:
        fail_once(monkeypatch, {"reduce": "add"}.get(name, "concatenate"))
    assert np.all(call() == comm.size)
    monkeypatch.undo()
    assert np.all(call() == comm.size)
    assert last_resort.spare.memory is not None


def fail_once(monkeypatch, name):
    """Let a function of NumPy lack memory, once."""
    original, failed = getattr(np, name), []

    def fail(*args, **kwargs):
        if not failed:
            failed.append(1)
            raise MemoryError
        return original(*args, **kwargs)

    monkeypatch.setattr(np, name, fail)
