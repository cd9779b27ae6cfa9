"""Checkpoint: every kind of object comes back; what does not fit changes nothing."""

from __future__ import annotations

import ast
import collections
import contextlib
import types
from pathlib import Path

import h5py
import numpy as np
import pytest
import variables

import mpidist
from mpidist import CheckpointError
from mpidist import VariableAggregation as Aggregation
from mpidist import VariableSynchronization as Synchronization
from mpidist.device.binding import gpu_count

Point = collections.namedtuple("Point", "x y")


def make(strategy, initial, aggregation=Aggregation.NONE, on_read=False, **kwargs):
    return variables.make(strategy, aggregation, initial, on_read, **kwargs)


def in_replicas(strategy, fn):
    """Run `fn(this replica's number)` in replica context; return its result here."""

    def step():
        return fn(mpidist.get_replica_context().replica_id_in_sync_group)

    (result,) = strategy.experimental_local_results(strategy.run(step))
    return result


class Unpicklable(Exception):
    def __init__(self, text):
        super().__init__(text, lambda: None)


class Keeper:
    """A user's object: says itself what there is to save."""

    def __init__(self, state):
        self.state = state
        self.fails_on, self.error = [], KeyError
        self.was_set = 0

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.was_set += 1
        if state in self.fails_on:
            raise self.error("not this one")
        self.state = state


def test_a_checkpoint_is_a_file_that_h5py_reads_with_the_objects_names(
    strategy, mpi_tmp_path
):
    w = make(strategy, np.arange(6.0).reshape(2, 3))
    layers = [{"w": np.ones(2), "b": np.float32(2)}, {"w": np.zeros(0), "b": 7}]
    checkpoint = mpidist.Checkpoint(w=w, layers=layers, note="grün", nothing=None)
    path = checkpoint.save(mpi_tmp_path / "ckpt")
    assert path == str(mpi_tmp_path / "ckpt-1.h5")
    with h5py.File(path) as file:
        found = []
        file.visit(found.append)
        assert sorted(found) == [
            *("layers", "layers/0", "layers/0/b", "layers/0/w", "layers/1"),
            *("layers/1/b", "layers/1/w", "note", "nothing", "save_counter", "w"),
        ]
        np.testing.assert_array_equal(file["w"], np.arange(6.0).reshape(2, 3))
        assert file["note"].asstr()[()] == "grün"
        assert file["layers/1/b"][()] == 7
        assert file["nothing"].shape is None
        assert file["layers/1/w"].shape == (0,)
        assert file.attrs["ranks"] == strategy.num_replicas_in_sync
        assert file["w"].attrs["role"] == "variable"
    assert Path(path).read_bytes().startswith(b"mpidist checkpoint 1")


def test_an_on_read_sum_saves_the_total_and_restores_shares(strategy, mpi_tmp_path):
    """As in TensorFlow: 3 and 4 on two replicas save 7, and restore 3.5 each."""
    n = strategy.num_replicas_in_sync
    v = make(strategy, np.zeros(2), Aggregation.SUM, on_read=True)
    in_replicas(strategy, lambda rank: v.assign(np.full(2, 3.0 + rank)))
    total = 3.0 * n + n * (n - 1) / 2
    checkpoint = mpidist.Checkpoint(v=v)
    path = checkpoint.write(mpi_tmp_path / "v")
    with h5py.File(path) as file:
        assert file["v"][:].tolist() == [total, total]
    in_replicas(strategy, lambda rank: v.assign(np.zeros(2)))
    checkpoint.restore(path)
    assert in_replicas(strategy, lambda rank: v.numpy().tolist()) == [total / n] * 2


@pytest.mark.parametrize("dtype", ["i8", "u4", "i1"])
def test_totals_of_integers_lose_no_count(strategy, mpi_tmp_path, dtype):
    totals = [7, 0, 101 if dtype == "i1" else 2**31 - 1, 1]
    if dtype != "u4":
        totals.append(-5)
    v = make(strategy, np.zeros(len(totals), dtype), Aggregation.SUM, on_read=True)
    v.assign(np.array(totals, dtype))
    checkpoint = mpidist.Checkpoint(v=v)
    path = checkpoint.write(mpi_tmp_path / "v")
    in_replicas(strategy, lambda rank: v.assign(np.zeros(len(totals), dtype)))
    checkpoint.restore(path)
    assert v.numpy().tolist() == totals


def test_an_on_read_mean_saves_the_mean(strategy, mpi_tmp_path):
    n = strategy.num_replicas_in_sync
    v = make(strategy, 0.0, Aggregation.MEAN, on_read=True)
    first = make(strategy, 0.0, Aggregation.ONLY_FIRST_REPLICA, on_read=True)
    count = make(strategy, 0, Aggregation.MEAN, on_read=True)

    def assign(rank):
        v.assign(1.0 + rank)
        first.assign(5.0 + rank)
        count.assign(10**6 + 3 * rank + 1)

    in_replicas(strategy, assign)
    mean, mean_count = 1.0 + (n - 1) / 2, count.numpy()
    checkpoint = mpidist.Checkpoint(v=v, first=first, count=count)
    path = checkpoint.write(mpi_tmp_path / "v")
    in_replicas(strategy, lambda rank: [x.assign(0) for x in (v, first, count)] and 0)
    checkpoint.restore(path)
    assert in_replicas(strategy, lambda rank: v.numpy()) == mean
    assert in_replicas(strategy, lambda rank: first.numpy()) == 5.0
    assert count.numpy() == mean_count  # the copies add up to the same


def test_an_on_read_variable_without_aggregation_is_refused(strategy, mpi_tmp_path):
    v = make(strategy, 0.0, Aggregation.NONE, on_read=True)
    with pytest.raises(ValueError, match="aggregation"):
        mpidist.Checkpoint(v=v).write(mpi_tmp_path / "v")
    assert not list(mpi_tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)], ids=str)
def test_arrays_are_filled_where_they_lie(strategy, mpi_tmp_path, shape):
    x = np.random.default_rng(0).normal(size=shape) * np.ones(shape)
    holder, expected = {"x": np.asarray(x)}, np.array(x)
    x = holder["x"]
    checkpoint = mpidist.Checkpoint(strategy=strategy, holder=holder)
    path = checkpoint.write(mpi_tmp_path / "x")
    x[...] = 0
    checkpoint.restore(path)
    assert holder["x"] is x
    np.testing.assert_array_equal(x, expected)


def test_nests_change_where_they_lie_or_where_they_are_held(strategy, mpi_tmp_path):
    x = np.arange(3)
    inner = [1, {"a": (x, 2.0)}]
    point = Point(np.ones(1), "p")
    history = [(0.5, 1)]
    queue = collections.deque([1, 2])
    checkpoint = mpidist.Checkpoint(
        strategy=strategy, inner=inner, point=point, history=history, queue=queue
    )
    path = checkpoint.write(mpi_tmp_path / "x")
    x[...] = 0
    inner[0] = 5
    inner[1]["a"] = (x, 3.0)
    point.x[...] = 4
    checkpoint.point = Point(point.x, "q")
    history.extend([(0.25, 2), (0.125, 3)])
    queue.append(3)
    checkpoint.restore(path)
    assert (inner[0], inner[1]["a"][1]) == (1, 2.0)
    assert inner[1]["a"][0] is x
    assert x.tolist() == [0, 1, 2]
    assert checkpoint.point == Point(point.x, "p")
    assert point.x.tolist() == [1]
    assert history == [(0.5, 1)]
    assert list(queue) == [1, 2]


def test_an_empty_list_takes_what_was_saved(strategy, mpi_tmp_path):
    checkpoint = mpidist.Checkpoint(strategy=strategy, history=[], best=None)
    checkpoint.history += [(0.5, {"accuracy": 1.0}), (0.25, {})]
    checkpoint.best = {"step": 3}
    path = checkpoint.write(mpi_tmp_path / "x")
    history = []
    again = mpidist.Checkpoint(strategy=strategy, history=history, best=None)
    again.restore(path)
    assert history == [(0.5, {"accuracy": 1.0}), (0.25, {})]
    assert again.best == {"step": 3}


def test_a_state_of_another_generator_is_refused(strategy, mpi_tmp_path):
    saved = mpidist.Checkpoint(strategy=strategy, g=np.random.default_rng(0))
    path = saved.write(mpi_tmp_path / "x")
    x = np.zeros(1)
    other = np.random.Generator(np.random.Philox(1))
    before = repr(other.bit_generator.state)
    checkpoint = mpidist.Checkpoint(strategy=strategy, g=other)
    with pytest.raises(CheckpointError, match=r"'g'.*Philox.*PCG64"):
        checkpoint.restore(path)
    assert repr(other.bit_generator.state) == before
    assert x == 0


@pytest.mark.parametrize("error", [KeyError, MemoryError, Unpicklable])
@pytest.mark.parametrize("is_earlier_refused", [False, True])
def test_a_state_that_is_refused_undoes_what_was_restored(
    strategy, mpi_tmp_path, error, is_earlier_refused
):
    """Also if the object then refuses its earlier state, too."""
    x = np.zeros(2)
    keepers = [Keeper(0), Keeper(0), Keeper(0)]
    checkpoint = mpidist.Checkpoint(strategy=strategy, k=keepers, x=x, step=1)
    path = checkpoint.write(mpi_tmp_path / "x")
    for i, keeper in enumerate(keepers):
        keeper.state = i + 1
    last = strategy.num_replicas_in_sync - 1
    if strategy.extended.replica_id == last:
        keepers[1].fails_on = [0, 2] if is_earlier_refused else [0]
        keepers[1].error = error
    x[...], checkpoint.step = 5, 2
    is_warned = pytest.warns(RuntimeWarning, match="'k/1': the object refused")
    with (
        is_warned if is_earlier_refused else contextlib.nullcontext(),
        pytest.raises((error, mpidist.errors.RemoteError), match="not this one"),
    ):
        checkpoint.restore(path)
    assert [keeper.state for keeper in keepers] == [1, 2, 3]
    assert (x.tolist(), checkpoint.step) == ([5, 5], 2)


def test_values_that_differ_must_be_per_replica(strategy, mpi_tmp_path):
    rank, n = strategy.extended.replica_id, strategy.num_replicas_in_sync
    x = np.full(rank + 1, float(rank))
    if n > 1:
        for value in (np.full(2, float(rank)), rank, f"rank {rank}", [0] * rank):
            with pytest.raises(mpidist.MismatchError, match="'deep/x"):
                mpidist.Checkpoint(strategy=strategy, deep={"x": value}).write(
                    mpi_tmp_path / "x"
                )
    assert not list(mpi_tmp_path.iterdir())
    own = {"x": mpidist.PerReplica((x,), (rank,)), "s": mpidist.PerReplica((rank,))}
    checkpoint = mpidist.Checkpoint(strategy=strategy, own=own)
    path = checkpoint.write(mpi_tmp_path / "x")
    x[...] = -1
    own["s"] = mpidist.PerReplica((None,))
    checkpoint.restore(path)
    assert x.tolist() == [float(rank)] * (rank + 1)
    assert own["s"].values == (rank,)


def test_mirrored_values(strategy, mpi_tmp_path):
    total = strategy.extended.reduce_to("SUM", np.ones(2), "CPU:0")
    checkpoint = mpidist.Checkpoint(strategy=strategy, total=total)
    path = checkpoint.write(mpi_tmp_path / "x")
    checkpoint.total = strategy.extended.reduce_to("SUM", np.zeros(2), "CPU:0")
    checkpoint.restore(path)
    assert np.asarray(checkpoint.total).tolist() == [strategy.num_replicas_in_sync] * 2


def test_checkpoints_may_hold_checkpoints(strategy, mpi_tmp_path):
    inner = mpidist.Checkpoint(strategy=strategy, step=3)
    outer = mpidist.Checkpoint(strategy=strategy, inner=inner)
    path = outer.save(mpi_tmp_path / "x")
    inner.step = 4
    outer.restore(path)
    assert outer.inner is inner
    assert (inner.step, inner.save_counter, outer.save_counter) == (3, 0, 1)


def test_the_counter_is_in_the_name_and_in_the_file(strategy, mpi_tmp_path):
    checkpoint = mpidist.Checkpoint(strategy=strategy, step=0)
    paths = [checkpoint.save(mpi_tmp_path / "new" / "model") for _ in range(3)]
    assert [p.rpartition("/")[2] for p in paths] == [f"model-{i}.h5" for i in (1, 2, 3)]
    again = mpidist.Checkpoint(strategy=strategy, step=0)
    again.restore(paths[1].removesuffix(".h5"))
    assert again.save_counter == 2
    with pytest.raises(mpidist.ArgumentError, match="save_counter"):
        again.save_counter = 3
    with pytest.raises(mpidist.ArgumentError, match="'write'"):
        mpidist.Checkpoint(write=3)


def misfits():
    x = np.zeros((2, 3))
    return {
        "shape": ({"x": np.zeros(6)}, r"'deep/x'.*float64 \(6,\).*float64 \(2, 3\)"),
        "dtype": ({"x": np.zeros((2, 3), "f4")}, r"'deep/x'.*float32.*float64"),
        "name": ({"x": x, "y": x}, "'deep/y'.*nothing with that name"),
        "kind": ({"x": 3}, "'deep/x'.*a number or text.*an array"),
        "list": ([x], "'deep'.*a list.*a dict of 1"),
        "tuple": ({"x": (x, 3)}, "'deep/x'.*a list.*an array"),
        "state": ({"x": Keeper(1)}, "'deep/x'.*the state of a object.*an array"),
        "random": ({"x": np.random.default_rng(0)}, "'deep/x'.*state of a generator"),
        "ranks": ({"x": mpidist.PerReplica((x,))}, "'deep/x'.*a value for each rank"),
    }


@pytest.mark.parametrize("case", sorted(misfits()))
def test_what_does_not_fit_changes_nothing(strategy, mpi_tmp_path, case):
    first = np.zeros(2)
    saved = mpidist.Checkpoint(
        strategy=strategy, a=first, deep={"x": np.ones((2, 3))}, z=1
    )
    path = saved.write(mpi_tmp_path / "x")
    first[...] = 7
    deep, message = misfits()[case]
    checkpoint = mpidist.Checkpoint(strategy=strategy, a=first, deep=deep, z=2)
    with pytest.raises(CheckpointError, match=message) as raised:
        checkpoint.restore(path)
    assert path in str(raised.value)
    assert (first.tolist(), checkpoint.z) == ([7, 7], 2)


def test_a_misfit_on_one_rank_raises_on_all(strategy, mpi_tmp_path):
    x = np.zeros(2)
    path = mpidist.Checkpoint(strategy=strategy, x=x).write(mpi_tmp_path / "x")
    last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1
    other = mpidist.Checkpoint(strategy=strategy, x=np.zeros(3 if last else 2))
    with pytest.raises(CheckpointError, match="'x'"):
        other.restore(path)


def test_a_part_of_the_objects_can_be_restored(strategy, mpi_tmp_path):
    x, y = np.ones(2), np.ones(3)
    saved = mpidist.Checkpoint(strategy=strategy, net={"x": x}, more=1)
    path = saved.write(mpi_tmp_path / "x")
    x[...] = 0
    part = mpidist.Checkpoint(strategy=strategy, net={"x": x, "y": y}, new=5)
    with pytest.raises(CheckpointError, match=r"'net/y'|'new'"):
        part.restore(path)
    status = part.restore(path, is_partial=True).expect_partial()
    assert x.tolist() == [1, 1]
    assert y.tolist() == [1, 1, 1]
    with pytest.raises(CheckpointError, match="'net/y', 'new'"):
        status.assert_existing_objects_matched()
    status = mpidist.Checkpoint(strategy=strategy, net={"x": x}).restore(path)
    status.assert_existing_objects_matched()
    with pytest.raises(CheckpointError, match="'more'"):
        status.assert_consumed()


def test_restoring_from_none_does_nothing(strategy):
    status = mpidist.Checkpoint(strategy=strategy, x=1).restore(None).expect_partial()
    for check in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            check()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (object(), TypeError, "'deep/x' is a builtins.object.*get_state"),
        (np.array([object()]), TypeError, "'deep/x'.*pickles"),
        ({1: 2, "a": 3}, ValueError, "'deep/x'.*all str or all int"),
        ({(1, 2): 3}, TypeError, "'deep/x'.*must be a str or an int"),
        ({"n" * 2000: 3}, ValueError, "2000 characters"),
        ({True: 3}, TypeError, "True"),
        (Synchronization.AUTO, TypeError, "'deep/x'"),
        (Keeper({"x": object()}), TypeError, "'deep/x/x'"),
        (np.ma.masked_array([1, 2], [0, 1]), TypeError, "mask"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_cannot_be_saved_is_named(strategy, mpi_tmp_path, value, error, message):
    checkpoint = mpidist.Checkpoint(strategy=strategy, deep={"x": value})
    with pytest.raises(error, match=message):
        checkpoint.write(mpi_tmp_path / "x")
    assert not list(mpi_tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(1).view(type("Units", (np.ndarray,), {})),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        bytearray(b"ab"),
        memoryview(b"ab"),
        type("Own", (np.float64,), {})(1.0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_would_come_back_as_another_type(strategy, mpi_tmp_path, value):
    checkpoint = mpidist.Checkpoint(strategy=strategy, own=Keeper([value]))
    with pytest.raises(TypeError, match=r"own/0.*(be saved|plain array)"):
        checkpoint.write(mpi_tmp_path / "x")


def test_what_holds_itself_is_refused(strategy, mpi_tmp_path):
    endless: list = [np.zeros(1)]
    endless.append(endless)
    checkpoint = mpidist.Checkpoint(strategy=strategy, endless=endless)
    with pytest.raises(ValueError, match="does it contain itself"):
        checkpoint.write(mpi_tmp_path / "x")
    plain: list = [1]
    both = mpidist.Checkpoint(strategy=strategy, plain=[1, [1]])
    path = both.write(mpi_tmp_path / "x")
    plain.append(plain)
    with pytest.raises(CheckpointError, match="'plain/1': expected 2 elements"):
        mpidist.Checkpoint(strategy=strategy, plain=plain).restore(path)


def test_an_error_of_get_state_on_one_rank_raises_on_all(strategy, mpi_tmp_path):
    class Failing(Keeper):
        def get_state(self):
            if strategy.extended.replica_id == strategy.num_replicas_in_sync - 1:
                raise KeyError("no state")
            return 1

    checkpoint = mpidist.Checkpoint(strategy=strategy, f=Failing(1))
    with pytest.raises(KeyError, match="no state"):
        checkpoint.write(mpi_tmp_path / "x")
    assert not list(mpi_tmp_path.iterdir())


def test_the_strategy_is_that_of_the_scope_or_the_variables(comm, strategy):
    with strategy.scope():
        assert mpidist.Checkpoint(x=1).strategy is strategy
    w = make(strategy, 1.0)
    assert mpidist.Checkpoint(model={"w": [w]}).strategy is strategy
    rows = mpidist.Dataset.range(4).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(rows))
    assert mpidist.Checkpoint(it=iterator).strategy is strategy
    lonely = mpidist.Checkpoint(x=1)
    if comm.size > 1:
        with pytest.raises(mpidist.ArgumentError, match="needs a strategy"):
            lonely.save("x")
    else:
        assert lonely.strategy.num_replicas_in_sync == 1


def manager_of(checkpoint):
    return mpidist.CheckpointManager(checkpoint, "x", 1)


@pytest.mark.parametrize(
    "use",
    [
        lambda checkpoint: checkpoint.save("x"),
        lambda checkpoint: checkpoint.write("x"),
        lambda checkpoint: checkpoint.restore("x"),
        lambda checkpoint: checkpoint.restore(None),
        mpidist.Checkpoint.sync,
        lambda checkpoint: manager_of(checkpoint).save(),
        lambda checkpoint: manager_of(checkpoint).restore_or_initialize(),
        lambda checkpoint: mpidist.PreemptionCheckpointHandler(
            None, manager_of(checkpoint)
        ),
    ],
)
@pytest.mark.mpi(min_size=2)
def test_variables_outside_scope_belong_to_one_rank(
    strategy, mpi_tmp_path, monkeypatch, use
):
    """All ranks would write them to one file."""
    monkeypatch.chdir(mpi_tmp_path)
    outside, inside = mpidist.Variable(1.0), make(strategy, 1.0)
    for checkpoint in (
        mpidist.Checkpoint(w={"w": [outside]}, x=1),
        mpidist.Checkpoint(types.SimpleNamespace(layers=[{"w": outside}])),
        mpidist.Checkpoint(inner=mpidist.Checkpoint(w=outside), v=inside),
        mpidist.Checkpoint(w=outside, strategy=mpidist.get_strategy()),
    ):
        with pytest.raises(mpidist.ArgumentError, match="variables of one rank needs"):
            use(checkpoint)
    strategy.barrier()
    assert not [path for path in mpi_tmp_path.rglob("*") if path.is_file()]
    assert outside.numpy() == 1


def test_variables_of_another_strategy_are_refused(strategy, mpi_tmp_path):
    alone = mpidist.Variable(1.0)
    with pytest.raises(mpidist.ContextError, match=r"'alone'.*Mixing"):
        mpidist.Checkpoint(strategy=strategy, alone=alone).write(mpi_tmp_path / "x")


def test_replica_context_is_refused(strategy, mpi_tmp_path):
    checkpoint = mpidist.Checkpoint(strategy=strategy, x=1)
    with pytest.raises(mpidist.ContextError, match=r"Checkpoint\.write"):
        strategy.run(lambda: checkpoint.write(mpi_tmp_path / "x"))


@pytest.mark.mpi(min_size=2)
def test_unlike_paths_are_refused(strategy, mpi_tmp_path):
    rank = strategy.extended.replica_id
    checkpoint = mpidist.Checkpoint(strategy=strategy, x=1)
    with pytest.raises(mpidist.MismatchError, match="path is"):
        checkpoint.write(mpi_tmp_path / f"x{rank}")
    with pytest.raises(mpidist.MismatchError, match="path is"):
        checkpoint.restore(mpi_tmp_path / f"x{rank}")
    with pytest.raises(mpidist.MismatchError, match=r"path is.*None"):
        checkpoint.restore(mpi_tmp_path / "x" if rank else None)


@pytest.mark.mpi(min_size=2)
def test_saving_by_one_rank_alone_is_an_error(strategy, mpi_tmp_path):
    checkpoint = mpidist.Checkpoint(strategy=strategy, x=1)
    with pytest.raises(mpidist.DivergenceError, match=r"Checkpoint\.write"):
        if strategy.extended.replica_id == 0:
            checkpoint.write(mpi_tmp_path / "x")
        else:
            strategy.reduce("SUM", np.ones(1))
    assert not list(mpi_tmp_path.iterdir())


@pytest.mark.slow
def test_arrays_of_pytorch_are_filled_where_they_lie(strategy, mpi_tmp_path):
    torch = pytest.importorskip("torch")
    x = torch.arange(4.0)
    checkpoint = mpidist.Checkpoint(strategy=strategy, net={"x": x})
    path = checkpoint.write(mpi_tmp_path / "x")
    x.zero_()
    checkpoint.restore(path)
    assert x.tolist() == [0, 1, 2, 3]
    assert checkpoint.net["x"] is x


def test_one_process_reads_a_checkpoint_without_a_strategy(
    strategy, comm, mpi_tmp_path, mpirun
):
    w = make(strategy, np.arange(3.0))
    path = mpidist.Checkpoint(w=w, step=4).write(mpi_tmp_path / "x")
    script = (
        "import sys, numpy as np, mpidist\n"
        "w = mpidist.Variable(np.zeros(3))\n"
        "checkpoint = mpidist.Checkpoint(w=w, step=0)\n"
        "checkpoint.restore(sys.argv[1]).assert_consumed()\n"
        "print(w.numpy().tolist(), checkpoint.step)\n"
    )
    ended = mpirun(1, script, path)
    assert ended.stdout == "[0.0, 1.0, 2.0] 4\n", ended.stderr


@pytest.mark.gpu
def test_arrays_and_variables_of_a_gpu(mpi_tmp_path, make_strategy):
    if not gpu_count():
        pytest.skip("needs a GPU and CuPy")
    import cupy

    strategy = make_strategy(allow_shared_gpu=True)
    w = make(strategy, np.arange(6.0).reshape(2, 3))
    large = make(strategy, np.arange(300_000.0))
    x = cupy.arange(5)
    total = make(strategy, 0, Aggregation.SUM, on_read=True)
    total.assign(7)
    for shard_bytes in (1 << 30, 1):
        checkpoint = mpidist.Checkpoint(
            w=w, large=large, nest={"x": x}, total=total, shard_bytes=shard_bytes
        )
        path = checkpoint.write(mpi_tmp_path / f"x{shard_bytes}")
        w.assign(cupy.zeros((2, 3)))
        large.assign(cupy.zeros(300_000))
        x[...] = 0
        total.assign(0)
        checkpoint.restore(path)
        assert w.numpy().tolist() == np.arange(6.0).reshape(2, 3).tolist()
        np.testing.assert_array_equal(large.numpy(), np.arange(300_000.0))
        assert isinstance(w.local, cupy.ndarray)
        assert x.get().tolist() == [0, 1, 2, 3, 4]
        assert int(total) == 7


def test_checkpoints_hold_no_pickles():
    """Loading a stranger's file runs no code: the modules that read do not unpickle."""
    folder = Path(mpidist.__file__).parent / "checkpoint"
    for path in folder.glob("*.py"):
        tree = ast.parse(path.read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"pickle", "eval", "exec", "importlib"}, path
