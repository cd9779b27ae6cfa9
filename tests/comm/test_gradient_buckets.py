"""Gradients that are reduced while others are computed, and what goes wrong there."""

import contextlib
import signal
import threading
import traceback

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import CommunicationOptions
from mpidist.comm.collectives.plans import Results
from mpidist.comm.gradient_buckets import divide

SHAPES = {"conv": (3, 3, 8), "w": (400, 300), "b": (300,), "scale": (), "none": (0, 2)}


def gradients(rank, step=0, dtype="f4"):
    return {
        key: (np.arange(np.prod(shape, dtype=int)) % 7 + rank + step)
        .reshape(shape)
        .astype(dtype)
        for key, shape in SHAPES.items()
    }


def totals(comm, step=0, dtype="f4", op="SUM"):
    everyone = [gradients(rank, step, dtype) for rank in range(comm.size)]
    sums = {key: np.sum([g[key] for g in everyone], axis=0) for key in SHAPES}
    return {k: v / comm.size if op == "MEAN" else v for k, v in sums.items()}


def require_equal(found, expected):
    assert set(found) == set(expected)
    for key, array in expected.items():
        np.testing.assert_allclose(found[key], array, rtol=1e-6)
        assert found[key].shape == array.shape


def require_good_step(comm, buckets):
    """Go through a step as if nothing had been."""
    mine = gradients(comm.rank)
    with buckets:
        for key in mine:
            buckets.put(key, mine[key])
    require_equal(buckets.result, totals(comm))


@pytest.fixture(params=[0, 1, 1000, 100_000])
def options(request):
    return CommunicationOptions(bytes_per_pack=request.param, timeout_seconds=60)


@pytest.fixture
def buckets(strategy):
    made = strategy.gradient_buckets(gradients(0))
    yield made
    made.close()


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("ranks_per_node", [None, "1", "2"])
def test_steps_give_the_reductions(
    comm, monkeypatch, options, op, ranks_per_node, make_strategy
):
    if ranks_per_node:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", ranks_per_node)
    strategy = make_strategy()
    buckets = strategy.gradient_buckets(gradients(0), op, options)

    def backward(step):
        mine = gradients(comm.rank, step)
        with buckets:
            for key in reversed(mine):
                buckets.put(key, mine[key])
        return buckets.result

    kept = []
    for step in range(4):
        found = strategy.run(backward, args=(step,))
        (local,) = strategy.experimental_local_results(found)
        kept.append(local)
    for step, local in enumerate(kept):  # later steps leave results alone
        require_equal(local, totals(comm, step, op=op))


@pytest.mark.mpi(min_size=2)
def test_reductions_go_on_beside_the_computation(comm, strategy):
    """One bucket's reduction is done while the next gradient is not there yet."""
    like = [np.zeros(1000), np.zeros(1000)]
    options = CommunicationOptions(bytes_per_pack=8000)
    buckets = strategy.gradient_buckets(like, "SUM", options)
    reduced = threading.Event()
    reduce = buckets._reduce

    def spy(*arguments):
        result = reduce(*arguments)
        reduced.set()
        return result

    buckets._reduce = spy
    with buckets:
        buckets.put(1, np.ones(1000))
        assert reduced.wait(600)
        comm.Barrier()  # other communication is possible
        assert strategy.reduce("SUM", 1) == comm.size
        buckets.put(0, np.ones(1000))
    assert (buckets.result[0] == comm.size).all()
    buckets.close()


def test_nests_of_lists_and_symmetric_arrays(comm, strategy):
    like = [{"w": np.zeros((300, 300)), "b": np.zeros(3)}, (np.zeros(5, "c8"), 1)]
    buckets = strategy.gradient_buckets(like, "SUM")
    mine = strategy.symmetric_like(like)
    for step in range(3):
        with buckets:
            mine[1][0][...], mine[1][1][...] = 1j * comm.rank, comm.rank
            buckets.put(1, mine[1])
            mine[0]["w"][...], mine[0]["b"][...] = comm.rank + step, 2
            buckets.put(0, mine[0])
        ranks = sum(range(comm.size))
        first, second = buckets.result
        assert (first["w"] == ranks + step * comm.size).all()
        assert (first["b"] == 2 * comm.size).all()
        assert (second[0] == 1j * ranks).all()
        assert second[1] == ranks
    buckets.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compression", [None, "float16"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "f4", "f8", "i2", "i8"])
def test_a_step_has_memory_for_all_that_it_returns(
    comm, strategy, monkeypatch, dtype, compression
):
    """Of the step's own: a GPU's thread has another stream's, which returns there."""
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    options = CommunicationOptions(compression=compression)
    like = {key: array.astype(dtype) for key, array in gradients(comm.rank).items()}
    buckets = strategy.gradient_buckets(like, "MEAN", options)
    taken = []
    empty = Results.empty

    def count(self, size, like, dtype=None):
        taken.append(size)
        return empty(self, size, like, dtype)

    monkeypatch.setattr(Results, "empty", count)
    for _ in range(2):
        with buckets:
            for key in like:
                buckets.put(key, like[key])
    assert len(taken) == 2
    for key, total in totals(comm, op="MEAN").items():
        found = buckets.result[key]
        assert found.dtype == ("f8" if dtype.kind in "iu" else dtype)
        np.testing.assert_allclose(found.astype("f8"), total, rtol=1e-2)
    buckets.close()


@pytest.mark.parametrize("compression", [None, "float16"])
def test_options_are_kept(comm, strategy, compression):
    options = CommunicationOptions(
        compression=compression, reproducible=True, implementation="MPI"
    )
    buckets = strategy.gradient_buckets([np.zeros(1000)], "SUM", options)
    with buckets:
        buckets.put(0, np.full(1000, 1 + 2.0**-12))
    is_narrow = compression and comm.size > 1
    assert (buckets.result[0] == comm.size * (1 if is_narrow else 1 + 2.0**-12)).all()
    buckets.close()


@pytest.mark.parametrize("culprit", [0, -1])
def test_a_missing_gradient_is_an_error_on_all(comm, strategy, buckets, culprit):
    mine = gradients(comm.rank)
    with (
        pytest.raises(mpidist.ArgumentError, match=r"not put in this step: \['w'\]"),
        buckets,
    ):
        for key in mine:
            if key != "w" or comm.rank != culprit % comm.size:
                buckets.put(key, mine[key])
    assert buckets.result is None
    require_good_step(comm, buckets)


@pytest.mark.parametrize("culprit", [0, -1])
def test_a_step_that_cannot_begin_on_one_rank_begins_on_none(
    comm, monkeypatch, buckets, culprit
):
    """Not even its thread stays."""

    def fail(size, like):
        raise MemoryError(f"no {size} bytes")

    if comm.rank == culprit % comm.size:
        monkeypatch.setattr(buckets._results, "begin", fail)
    mine = gradients(comm.rank)
    with pytest.raises(MemoryError, match="bytes"), buckets:
        buckets.put("w", mine["w"])
    monkeypatch.undo()
    for thread in threading.enumerate():
        if thread.name == "mpidist-reduce":
            thread.join(600)
            assert not thread.is_alive()
    require_good_step(comm, buckets)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("v", np.zeros(3, "f4"), "no gradient has the key 'v'"),
        ("b", np.zeros(299, "f4"), r"must be float32 of shape \(300,\)"),
        ("b", np.zeros(300, "f8"), "not float64"),
        ("b", [np.zeros(300, "f4")], "must be like"),
        ("w", gradients(0)["w"], "put twice"),
    ],
)
def test_bad_gradients_are_refused_on_all(comm, buckets, key, value, message):
    mine = gradients(comm.rank)
    with pytest.raises(mpidist.ArgumentError, match=message), buckets:
        buckets.put("w", mine["w"])
        if comm.rank == 0:
            buckets.put(key, value)
        for key in ("conv", "b", "scale", "none"):
            buckets.put(key, mine[key])


def test_put_belongs_inside(strategy, buckets):
    with pytest.raises(mpidist.ContextError, match="inside"):
        buckets.put("w", 1)
    begun = pytest.raises(mpidist.ContextError, match="begun already")
    with begun, buckets, buckets:
        raise AssertionError("it was entered twice")


def test_what_can_be_given(comm, strategy):
    with pytest.raises(TypeError, match="mapping, a list or a tuple"):
        strategy.gradient_buckets(np.zeros(3))
    with pytest.raises(mpidist.DTypeError):
        strategy.gradient_buckets([np.zeros(3, bool)])
    with pytest.raises(ValueError, match="reduce_op"):
        strategy.gradient_buckets([np.zeros(3)], "MAX")
    if comm.size > 1:
        with pytest.raises(mpidist.MismatchError):
            strategy.gradient_buckets([np.zeros(3 + comm.rank)])


def test_closed_buckets_are_refused(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    one, other = (strategy.gradient_buckets([np.zeros(3)]) for _ in range(2))
    one.close()
    one.close()
    with pytest.raises(mpidist.ContextError, match="closed"), one:
        pass
    with other:
        other.put(0, np.ones(3))
    strategy.experimental_finalize()
    other.close()
    with pytest.raises(mpidist.ContextError), other:
        pass
    with pytest.raises(mpidist.ContextError, match="finalized"):
        strategy.gradient_buckets([np.zeros(3)])


@pytest.mark.mpi(min_size=2)
def test_without_threads_it_is_said_and_done_at_the_end(
    comm, monkeypatch, make_strategy
):
    strategy = make_strategy()
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    warned = pytest.warns(RuntimeWarning, match="THREAD_MULTIPLE")
    with warned if comm.rank == 0 else contextlib.nullcontext():
        buckets = strategy.gradient_buckets(gradients(0))
    mine = gradients(comm.rank)
    with buckets:
        assert not [t for t in threading.enumerate() if t.name == "mpidist-reduce"]
        for key in mine:
            buckets.put(key, mine[key])
    require_equal(buckets.result, totals(comm))


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_is_told(comm):
    """The others wait at the end of the block, and raise at the deadline."""
    strategy = mpidist.MirroredStrategy(communicator=comm.Dup())
    options = CommunicationOptions(timeout_seconds=0.3)
    buckets = strategy.gradient_buckets([np.zeros(3)], "SUM", options)
    buckets.__enter__()
    if comm.rank == 0:
        buckets.put(0, np.ones(3))
        with pytest.raises(mpidist.DeadlineError, match="did not arrive"):
            buckets.__exit__(None, None, None)
    comm.Barrier()
    if comm.rank:  # let the thread come to an end
        buckets.put(0, np.ones(3))
        buckets._step.finish()
    strategy.extended.consensus.close()
    buckets._own.close()


class AlarmError(Exception):
    """A signal handler raises it."""


@pytest.mark.parametrize("kind", [AlarmError, KeyboardInterrupt])
def test_a_signal_at_the_beginning_of_a_step_raises_on_all(comm, kind, make_strategy):
    strategy = make_strategy()
    buckets = strategy.gradient_buckets(gradients(0), "SUM")
    require_good_step(comm, buckets)

    def interrupt(_, frame):
        names = {found.f_code.co_name for found, _ in traceback.walk_stack(frame)}
        if "agree" in names:  # this rank waits for the others
            raise kind
        signal.setitimer(signal.ITIMER_REAL, 0.001)

    if comm.size == 1:
        return  # it waits for nobody
    if comm.rank == 0:
        handler = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        with pytest.raises(kind), buckets:
            pass
        signal.signal(signal.SIGALRM, handler)
    comm.Barrier()
    if comm.rank:
        with pytest.raises(mpidist.CollectiveError, match="rank 0 left"):
            require_good_step(comm, buckets)


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupted_step_ends_on_all(comm, strategy, buckets, late):
    """The thread of each replica ends, whichever gradients are missing."""
    key = list(SHAPES)[-1 if late else 0]
    mine = gradients(comm.rank)
    if comm.rank == comm.size - 1:
        with pytest.raises(KeyboardInterrupt), buckets:
            buckets.put(key, mine[key])
            raise KeyboardInterrupt
    elif comm.size > 1:
        with pytest.raises(mpidist.CollectiveError), buckets:
            for each in mine:
                buckets.put(each, mine[each])
    if comm.size > 1 and comm.rank == comm.size - 1:
        with pytest.raises(mpidist.MpidistError):
            strategy.reduce("SUM", 1)
    assert not [t for t in threading.enumerate() if t.name == "mpidist-reduce"]


def test_buckets_are_filled_in_order():
    found = divide([4, 4, 4, 9, 1, 2, 0], [6, 5, 4, 3, 2, 1, 0], 8)
    assert found == [[6, 5], [4], [3], [2, 1], [0]]
    assert divide([1, 1, 5, 5, 1, 1], range(6), 10) == [[0, 1], [2, 3], [4, 5]]
    assert divide([5, 5], [0, 1], 1) == [[0], [1]]
    assert divide([3], [0], 100) == [[0]]


def test_dropped_buckets_lend_their_communicator_to_others(comm, strategy):
    """However the ranks drop them: at once, later, or by `close`."""
    kept = strategy.gradient_buckets([np.zeros(3)])
    sometimes = []
    for step in range(40):
        if step % (comm.rank + 2) == 0:
            sometimes.clear()
        buckets = strategy.gradient_buckets([np.zeros(3)], "SUM")
        sometimes.append(buckets)
        with buckets, kept:
            kept.put(0, np.full(3, 1.0))
            buckets.put(0, np.full(3, float(step)))
        assert buckets.result[0].tolist() == [step * comm.size] * 3
        assert kept.result[0].tolist() == [comm.size] * 3
        if step % 3 == 0:
            buckets.close()
    assert len(strategy.extended.sides) <= 2 + 2 * comm.size


def test_buckets_without_gradients(strategy):
    for nothing in ({}, [], {"a": []}):
        with strategy.gradient_buckets(nothing) as buckets:
            pass
        assert buckets.result == nothing
        with buckets:  # now in the order of the first step
            pass
        assert buckets.result == nothing
