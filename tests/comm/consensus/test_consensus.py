"""All ranks fail together: Consensus, and the collectives that are built on it."""

import contextlib
import gc
import os
import pickle
import re
import threading
import time
import weakref

import launching
import numpy as np
import pytest
from all_ranks import require_usable
from node_barriers import make_node_barrier

import mpidist
from mpidist.comm.consensus import consensus as module
from mpidist.comm.consensus import waiting
from mpidist.comm.consensus.comparison import SharedMemoryComparison
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.signatures import CallSignature, Tag
from mpidist.util import nest

# What pickle raises for a function without a name of its own, by Python's version
UNPICKLABLE = (AttributeError, TypeError, pickle.PicklingError)


@pytest.fixture(params=["mpi", "shared memory"])
def consensus(comm, request):
    barrier = make_node_barrier(comm, 64) if request.param == "shared memory" else None
    consensus = Consensus(comm.Dup(), barrier and SharedMemoryComparison(barrier, 32))
    yield consensus
    consensus.close()
    consensus.comm.Free()
    if barrier:
        barrier.close()


@pytest.fixture
def several(comm):
    """The number of the last of several ranks."""
    if comm.size == 1:
        pytest.skip("ranks can differ only where there are several")
    return comm.size - 1


def all_but_last(comm):
    """Return how messages name the other ranks."""
    return ["", "", "rank 0", "ranks 0, 1", "ranks 0, 1, 2"][comm.size]


def call(strategy, name, *args):
    """Call a collective of cross-replica or, with "all_", of replica context."""
    if not name.startswith("all_"):
        return getattr(strategy, name)(*args)
    return strategy.run(lambda: getattr(mpidist.get_replica_context(), name)(*args))


def test_objects_that_are_equal_on_all_ranks_are_not_sent(comm, consensus, monkeypatch):
    sent, send = [], module._all_gather_bytes
    monkeypatch.setattr(
        module, "_all_gather_bytes", lambda *args: sent.append(1) or send(*args)
    )
    found = consensus.gather_objects("equal", lambda: [1, "a"])
    assert found == [[1, "a"]] * comm.size
    assert len(set(map(id, found))) == comm.size  # whoever changes one changes no other
    assert not sent
    assert consensus.gather_objects("all but one", lambda: comm.rank == 0) == [
        rank == 0 for rank in range(comm.size)
    ]
    assert len(sent) == (comm.size > 1)


@pytest.mark.parametrize("senders", [1, 2, 3, 100])
def test_the_first_ranks_alone_send(comm, consensus, senders):
    for length in (0, 5, 1000):
        mine = [comm.rank] * length
        found = consensus.gather_objects("some", mine.copy, senders)
        assert found == [[rank] * length for rank in range(min(senders, comm.size))]


@pytest.mark.parametrize("culprit", [0, -1])
def test_one_ranks_error_is_raised_on_all(comm, consensus, culprit):
    culprit %= comm.size
    error = KeyError("lost") if comm.rank == culprit else None
    with pytest.raises(KeyError, match="lost") as info:
        consensus.require_same(CallSignature("step"), error)
    if comm.size > 1:
        assert info.value.origin_rank == culprit
    if error is None:
        assert type(info.value.__cause__) is mpidist.errors.RemoteError
        assert f"on rank {culprit}:\nKeyError: 'lost'" in str(info.value.__cause__)
    assert consensus.gather_objects("next", lambda: 1) == [1] * comm.size


def test_each_failed_rank_raises_its_own_error(comm, consensus):
    errors = [ValueError("zero"), KeyError("one"), None, OSError("three")]
    mine = errors[comm.rank]
    with pytest.raises((ValueError, KeyError, OSError)) as info:
        consensus.require_same(CallSignature("step"), mine)
    assert info.value is mine or (mine, str(info.value)) == (None, "zero")


def test_an_error_that_cannot_be_sent_is_quoted_to_the_others(comm, consensus):
    class LocalError(Exception):
        pass

    error = LocalError("no room") if comm.rank == 0 else None
    with pytest.raises(LocalError if error else mpidist.errors.RemoteError) as info:
        consensus.require_same(CallSignature("step"), error)
    assert error or str(info.value).endswith("LocalError: no room")


def test_an_error_goes_before_a_difference(comm, consensus):
    error = OSError("disk") if comm.rank == 0 else None
    with pytest.raises(OSError, match="disk"):
        consensus.require_same(CallSignature(f"step {comm.rank}"), error)


def test_other_operations_are_a_divergence_that_names_both(comm, consensus, several):
    operation = "save" if comm.rank == several else "load"
    with pytest.raises(mpidist.DivergenceError) as info:
        consensus.require_same(CallSignature(operation))
    assert re.search(
        r"different collectives \(call 1 of this strategy\): "
        rf"load at .*test_consensus.py:\d+ on {all_but_last(comm)}; "
        rf"save at .*test_consensus.py:\d+ on rank {several}\.",
        str(info.value),
    )
    consensus.require_same(CallSignature("step"))


def step(value, leaf=("f8", (2,)), **options):
    leaves, spec = nest.flatten(value)
    return CallSignature("step", tuple(options.items()), spec, (leaf,) * len(leaves))


STRUCTURE = "the structure of value"
DIFFERENCES = [
    (step(1, op="SUM"), step(1, op="MEAN"), "op", "SUM", "MEAN"),
    (step(1), step(1, ("f4", (2,))), "value", r"f8 \(2,\)", r"f4 \(2,\)"),
    (step([1]), step([1], ("f8", ())), r"value\[0\]", r"f8 \(2,\)", r"f8 \(\)"),
    (step([1]), step((1,)), STRUCTURE, r".*\[\*\].*", r".*\(\*,\).*"),
    (step({"a": 1}), step({"b": 1}), STRUCTURE, ".*'a'.*", ".*'b'.*"),
    (step(1), CallSignature("step"), STRUCTURE, r".*\*.*", "nothing"),
]


@pytest.mark.parametrize(("usual", "other", "name", "one", "two"), DIFFERENCES)
def test_other_arguments(comm, consensus, several, usual, other, name, one, two):
    with pytest.raises(mpidist.MismatchError) as info:
        consensus.require_same(other if comm.rank == several else usual)
    assert re.fullmatch(
        f"step: the replicas' arguments differ: {name} is {one} on "
        f"{all_but_last(comm)}; {two} on rank {several}",
        str(info.value),
    )
    consensus.require_same(usual)


@pytest.mark.parametrize("root", [0, -1])
def test_root_only_runs_on_the_root_alone(comm, consensus, root):
    root, calls = root % comm.size, []
    result = consensus.root_only("ask", lambda: calls.append(1) or comm.rank, root)
    assert result == root
    assert len(calls) == (comm.rank == root)


@pytest.mark.parametrize("root", [0, -1])
def test_what_root_only_raises_is_raised_on_all(comm, consensus, root):
    with pytest.raises(FileNotFoundError) as info:
        consensus.root_only("open", lambda: os.stat("/not/there"), root % comm.size)
    assert info.value.filename == "/not/there"
    with pytest.raises(UNPICKLABLE, match="pickle"):
        consensus.root_only("open", lambda: lambda: 1, root % comm.size)
    assert consensus.root_only("open", lambda: "ok") == "ok"


def test_values_that_cannot_be_gathered_are_an_error_on_all(comm, consensus, several):
    value = (lambda: 1) if comm.rank == several else 1
    with pytest.raises(UNPICKLABLE, match="pickle"):
        consensus.gather_objects("step", lambda: value)
    assert consensus.gather_objects("step", lambda: 1) == [1] * comm.size


@contextlib.contextmanager
def deadline_when_missing(late, consensus, monkeypatch):
    """Let deadlines pass as soon as only the ranks `late` are missing, however long it
    takes the others to arrive.
    """
    clock, ahead, has_ended = time.monotonic, 0.0, threading.Event()
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead)

    def go_ahead():
        nonlocal ahead
        while consensus.comparison.missing() != late and not has_ended.is_set():
            time.sleep(0.01)
        ahead = 1e6

    thread = threading.Thread(target=go_ahead)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()
        monkeypatch.undo()


@pytest.mark.parametrize(
    "late",
    [
        pytest.param([0], marks=pytest.mark.slow),
        [-1],
        pytest.param([1, 2, 3], marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", ["in memory", "direct", "passed on"])
def test_ranks_that_miss_a_deadline_are_named(comm, several, late, way, monkeypatch):
    if way == "passed on":  # as between more than 16 ranks
        monkeypatch.setattr(waiting, "_MOST_DIRECT", 1)
    on_board = way == "in memory"
    late = [rank % comm.size for rank in late if rank < comm.size]
    # Not freed: that might wait for all ranks
    comparison = (
        SharedMemoryComparison(make_node_barrier(comm, 64), 32) if on_board else None
    )
    consensus = Consensus(comm.Dup(), comparison)
    comm.Barrier()
    if comm.rank not in late:
        with (
            deadline_when_missing(late, consensus, monkeypatch),
            pytest.raises(mpidist.DeadlineError, match="in step ") as info,
        ):
            consensus.require_same(CallSignature("step"), timeout=1000)
        names = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
        assert str(info.value).endswith(f"), but {names} did not arrive")
        # Its own deadline, or that of another rank which told this one
        told = "(this strategy cannot communicate any more: )?"
        who = re.match(
            rf"{told}rank (\d) waited .*_consensus.py:\d+\),", str(info.value)
        )
        assert who is not None
        assert int(who[2]) not in late
    consensus.close()
    comm.Barrier()


def test_memory_that_a_late_rank_may_write_to_is_kept(comm, several):
    consensus = Consensus(comm.Dup())  # not freed: that might wait for all ranks
    received = weakref.ref(consensus.comparison._received)
    if comm.rank != several:
        with pytest.raises(mpidist.DeadlineError):
            consensus.require_same(CallSignature("step"), timeout=0.01)
        consensus.close()
    comm.Barrier()
    if comm.rank == several:
        with pytest.raises(mpidist.DeadlineError, match="any more"):
            consensus.require_same(CallSignature("step"))
        consensus.close()
    del consensus
    gc.collect()
    assert comm.rank == several or received() is not None


@pytest.mark.skipif(
    launching.is_open_mpi(), reason="Open MPI waits for what is lost for ever"
)
def test_messages_of_a_freed_communicator_mean_nothing_to_the_next(comm, several):
    """MPICH gives what nobody has received to the next one."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    for length in (8, 16, 17, 40, 2000):
        old = Consensus(comm.Dup())
        for rank in others:
            old.comm.Isend(np.ones(length, np.uint8), rank, Tag.ANNOUNCEMENT)
        old.departures.leave("it is over", is_deadline=False)
        old.comm.Barrier()
        old.close()
        old.comm.Free()
        consensus = Consensus(comm.Dup())
        consensus.calls = waiting._COLLECT_CALLS  # so announcements are received
        consensus.wait(consensus.comm.Ibarrier(), None, "step")
        consensus.require_same("step")  # looks for ranks that have left
        consensus.close()
        consensus.comm.Free()


@pytest.mark.parametrize("most_direct", [16, 1])
def test_all_that_ranks_announce_is_received_before_a_strategy_ends(
    comm, several, monkeypatch, most_direct
):
    monkeypatch.setattr(waiting, "_ANNOUNCE_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "_LOOKS", 1)
    monkeypatch.setattr(waiting, "_MOST_DIRECT", most_direct)
    options = mpidist.CommunicationOptions(implementation="MPI")
    for step in range(20):
        strategy = mpidist.MirroredStrategy(communicator=comm)
        departures = strategy.extended.consensus.departures
        for _ in range(5):
            call(strategy, "all_reduce", "SUM", np.ones(5), options)
            waiter = strategy.extended.consensus.waiting
            request = strategy.extended.consensus.comm.Ibarrier()
            waiter.wait(request, None, step)
        strategy.experimental_finalize()
        sent = comm.allreduce(departures.sent_to)
        assert departures.received == sent[comm.rank]


def test_a_replica_that_misses_a_deadline_ends_the_strategy(
    comm, strategy, several, monkeypatch
):
    abandoned = mpidist.MirroredStrategy(communicator=comm)
    options = mpidist.CommunicationOptions(timeout_seconds=1000)
    if comm.rank != several:
        late = f"rank {several} did not arrive"
        consensus = abandoned.extended.consensus
        with (
            deadline_when_missing([several], consensus, monkeypatch),
            pytest.raises(TimeoutError, match=f"in all_reduce .* {late}") as info,
        ):
            call(abandoned, "all_reduce", "SUM", 1, options)
        assert type(info.value) is mpidist.DeadlineError
        with pytest.raises(mpidist.CollectiveError, match=f"any more: .* {late}"):
            abandoned.reduce("SUM", 1)
    abandoned.extended.consensus.close()
    require_usable(strategy)


ONE = np.ones((2, 3))
GOOD = {"reduce": ("SUM", ONE), "gather": (ONE, 0)}
GOOD |= {"all_reduce": ("SUM", ONE), "all_gather": (ONE, 0)}
BAD = [
    (("NONE", ONE), mpidist.ArgumentError, "SUM, MEAN, .*, not 'NONE'"),
    ((3, ONE), mpidist.ArgumentTypeError, r"reduce_op .* not 3 \(int\)"),
    ((None, ONE), mpidist.ArgumentTypeError, "reduce_op .* not None"),
    (("SUM", None), mpidist.ArgumentTypeError, "value must be .* not None"),
    (("SUM", [1, {"a": "x"}]), mpidist.ArgumentTypeError, r"value\[1\]\['a'\] must"),
    (("SUM", [1, ONE > 0]), mpidist.DTypeError, r"value\[1\] has dtype bool"),
    (("MEAN", True), mpidist.DTypeError, "value has dtype bool"),
    (("SUM", np.array([None])), mpidist.DTypeError, "value has dtype object"),
    (("SUM", np.array([1], "m8[s]")), mpidist.DTypeError, "value has dtype timedelta"),
    (("SUM", ONE, 2), mpidist.ArgumentError, "axis 2 .* value, which has 2 dim"),
    (("SUM", [ONE, ONE[0]], -2), mpidist.ArgumentError, r"axis -2 .* value\[1\]"),
    (("SUM", ONE, ()), mpidist.ArgumentError, r"axis .* not \(\)"),
    (("SUM", ONE, (1, -1)), mpidist.ArgumentError, r"axis .* not \(1, -1\)"),
    (("SUM", ONE, 0.5), mpidist.ArgumentTypeError, "axis .* not 0.5"),
    (("SUM", ONE, [None]), mpidist.ArgumentTypeError, "axis .* not .*None"),
]
BAD = [("reduce", *row) for row in BAD]
BAD += [("all_reduce", *row) for _, *row in BAD if len(row[0]) == 2]
OF_GATHER = [
    ((ONE, 2), mpidist.ArgumentError, "axis 2 is out of range for value"),
    (([ONE, ONE[0]], -2), mpidist.ArgumentError, r"axis -2 .* value\[1\]"),
    ((ONE, "0"), mpidist.ArgumentTypeError, "axis .* not '0'"),
    ((ONE, None), mpidist.ArgumentTypeError, "axis .* not None"),
    ((ONE, (0,)), mpidist.ArgumentTypeError, r"axis .* not \(0,\)"),
    ((1.0, 0), mpidist.ArgumentError, "value is a scalar"),
    (({"a": ONE, "b": np.int8(1)}, 0), mpidist.ArgumentError, r"value\['b'\] is a sc"),
    (("text", 0), mpidist.ArgumentTypeError, "value must be .* not 'text'"),
    ((np.array([None]), 0), mpidist.DTypeError, "value has dtype object"),
]
BAD += [(name, *row) for name in ("gather", "all_gather") for row in OF_GATHER]


@pytest.mark.parametrize(("name", "args", "error", "match"), BAD)
def test_one_bad_argument_is_an_error_on_all(comm, strategy, name, args, error, match):
    last = comm.size - 1
    with pytest.raises(error, match=match) as info:
        call(strategy, name, *(args if comm.rank == last else GOOD[name]))
    assert type(info.value) is error
    assert comm.size == 1 or info.value.origin_rank == last
    require_usable(strategy)


UNLIKE = [
    (("MEAN", ONE), "reduce_op is SUM on {others}; MEAN on {last}"),
    (("SUM", ONE[0]), r"value is float64 \(2, 3\) on {others}; .* \(3,\) on {last}"),
    (("SUM", ONE.astype("i4")), "value is float64 .* {others}; int32 .* on {last}"),
    (("SUM", {"a": ONE}), "the structure of value is .* on {others}; .* on {last}"),
]


UNLIKE = [(name, *row) for name in ("reduce", "all_reduce") for row in UNLIKE]
OF_GATHER = [
    ((ONE, 1), "axis is 0 on {others}; 1 on {last}"),
    ((ONE[:, :2], 0), r"value is float64 .*3\) on {others}; float64 .*2\) on {last}"),
    ((ONE[0], 0), "value is .* on {others}; .* on {last}"),
    ((ONE > 0, 0), "value is float64 .* on {others}; bool .* on {last}"),
    (([ONE], 0), "the structure of value is .* on {others}; .* on {last}"),
]
UNLIKE += [(name, *row) for name in ("gather", "all_gather") for row in OF_GATHER]


@pytest.mark.parametrize(("name", "args", "match"), UNLIKE)
def test_unlike_arguments(comm, strategy, several, name, args, match):
    match = match.format(others=all_but_last(comm), last=f"rank {several}")
    with pytest.raises(mpidist.MismatchError, match=f"{name}: .* differ: {match}$"):
        call(strategy, name, *(args if comm.rank == several else GOOD[name]))
    require_usable(strategy)


PAIRS = [("reduce", "gather"), ("all_reduce", "all_gather"), ("reduce", "all_reduce")]


@pytest.mark.parametrize(("usual", "other"), PAIRS)
def test_another_collective_on_one_replica(comm, strategy, several, usual, other):
    name = other if comm.rank == several else usual
    with pytest.raises(mpidist.DivergenceError) as info:
        call(strategy, name, *GOOD[name])
    assert re.search(f"{usual} at .* on {all_but_last(comm)}", str(info.value))
    assert re.search(f"{other} at .* on rank {several}", str(info.value))
    require_usable(strategy)


@pytest.mark.parametrize("field", ["bytes_per_pack", "timeout_seconds"])
def test_options_that_differ(comm, strategy, several, field):
    fields = {field: 60} if comm.rank == several else {}
    options = mpidist.CommunicationOptions(**fields)
    with pytest.raises(mpidist.MismatchError, match=field):
        call(strategy, "all_reduce", "SUM", [1, 2], options)
    require_usable(strategy)


class Held:
    """Something large that a function had when it failed."""


@pytest.mark.parametrize(
    ("way", "failing"),
    [
        ("run", "one"),
        ("reserve", "all"),
        pytest.param("run", "all", marks=pytest.mark.slow),
        pytest.param("reserve", "one", marks=pytest.mark.slow),
    ],
)
def test_what_a_failed_function_held_is_freed_at_once(comm, consensus, way, failing):
    """Not by the garbage collector some time later: it may be most of a GPU."""
    held = []

    def fail():
        thing = Held()
        held.append(weakref.ref(thing))
        if comm.rank == 0 or failing == "all":
            raise MemoryError(f"{thing} needs too much")

    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(MemoryError), consensus.call("test") as it:
            consensus.run("test", fail) if way == "run" else it.reserve(fail)
            it.agree()
        assert held[0]() is None
    finally:
        gc.enable()
