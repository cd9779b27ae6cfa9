"""An open call: what may fail is reserved, all ranks agree, data move."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import mpidist
from mpidist.comm.consensus.comparison import MaximumComparison
from mpidist.comm.consensus.consensus import Consensus


@pytest.fixture
def consensus(comm):
    consensus = Consensus(comm.Dup())
    yield consensus
    consensus.close()
    # The next communicator may get its number, and would receive what is on its way
    if consensus.drain():
        consensus.comm.Free()


def fail_on(comm, rank):
    if comm.rank == rank % comm.size:
        raise OSError(f"rank {comm.rank} has no room")
    return comm.rank


@pytest.mark.parametrize("culprit", [0, -1])
@pytest.mark.parametrize("step", ["reserve", "finish"])
def test_what_fails_on_one_rank_is_raised_on_all(comm, consensus, step, culprit):
    for _ in range(2):  # it can go on
        with (
            pytest.raises(OSError, match="has no room"),
            consensus.call("move") as call,
        ):
            if step == "finish":
                call.reserve(int)
                call.agree()
            getattr(call, step)(fail_on, comm, culprit)
            call.agree()
    with consensus.call("move") as call:
        assert call.reserve(lambda: comm.rank) == comm.rank
        call.agree()
        assert call.finish(lambda: 5) == 5
    assert consensus.is_usable


def test_addresses_are_compared_along(comm, consensus):
    for addresses, is_same in [([7] * 4, True), ([0] * 4, False), (range(1, 5), False)]:
        with consensus.call("move") as call:
            found = call.agree(addresses[comm.rank])
        assert found == (is_same or (comm.size == 1 and addresses[0] != 0))


def test_an_agreement_without_an_open_call_is_a_mistake(comm, consensus):
    call = consensus.call("move")
    for use in (call.agree, lambda: call.reserve(int)):
        with pytest.raises(AssertionError):
            use()
    assert consensus.gather_objects("next", lambda: 1) == [1] * comm.size


def test_what_was_reserved_must_be_agreed_on(comm, consensus):
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    with pytest.raises(AssertionError), consensus.call("move") as call:
        call.reserve(int)


def test_an_error_in_the_movement_breaks_the_strategy(comm, consensus):
    if comm.size == 1:
        pytest.skip("one rank leaves nobody behind")
    leaves = pytest.raises(KeyError) if comm.rank == 0 else contextlib.nullcontext()
    with leaves, consensus.call("move") as call:
        call.agree()
        comm.Barrier()  # all have agreed
        if comm.rank == 0:
            raise KeyError
    assert consensus.is_usable == (comm.rank > 0)
    with pytest.raises(mpidist.CollectiveError, match="rank 0 left move"):
        consensus.require_same("the next call")


def test_numpy_ignores_errors_while_it_is_open(comm, consensus):
    with np.errstate(all="raise"):
        with consensus.call("move") as call:
            call.agree()
            assert np.isinf(np.array(1e308) * 10)
        with pytest.raises(FloatingPointError):
            np.array(1e308) * 10


def test_it_can_be_opened_again_and_inside_itself(comm, consensus):
    call = consensus.call("move")
    for _ in range(3):
        with call, call:
            call.reserve(int)
            call.agree()
    assert consensus.call("move") is call


def test_many_operations_are_not_kept(comm, consensus):
    for i in range(300):
        with consensus.call(f"move {i}") as call:
            call.agree()
    assert len(consensus._bare) <= 256


def test_it_takes_any_comparison(comm):
    dup = comm.Dup()
    consensus = Consensus(dup)
    consensus.comparison.close()
    consensus.comparison = MaximumComparison(dup, consensus.departures)
    with consensus.call("move", timeout=60) as call:
        call.reserve(int)
        assert not call.agree()
    consensus.close()
    dup.Free()


def test_run_evaluates_agrees_and_raises_on_all(comm, consensus):
    assert consensus.run("choose", max, 3, 4, same=lambda m: (("most", m),)) == 4
    with pytest.raises(OSError, match="has no room"):
        consensus.run("choose", fail_on, comm, -1)
    with pytest.raises(OSError, match="has no room"):
        consensus.run("choose", int, same=lambda _: [fail_on(comm, 0)][1:])
    if comm.size > 1:
        with pytest.raises(mpidist.MismatchError, match="most is 0 on rank 0"):
            consensus.run("choose", int, same=lambda _: (("most", comm.rank),))
    assert consensus.run("choose", lambda: comm.rank) == comm.rank
