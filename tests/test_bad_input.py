"""What cannot be used is refused with an error that names it, on all ranks at once."""

import itertools
import json
import math
import os
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpidist
from mpidist import Dataset
from mpidist.comm.transports.tuning import Layout, find_table
from mpidist.launch.launchers import check_launch
from mpidist.util import validation
from mpidist.util.settings import SETTINGS, hang_seconds

PURE = settings(derandomize=True, database=None, deadline=None, max_examples=50)
SWITCHES = "ALLOW_SHARED_GPU ALLOW_SINGLETON BANNER BIND_GPU CUDA_AWARE FULL_TRACEBACKS"


class Unspeakable:
    """Not even its repr can be had."""

    def __repr__(self):
        raise RuntimeError("no repr")

    __fspath__ = __index__ = __repr__


def junk():
    """Values that hardly any argument can be."""
    yield from (None, True, 0, -1, 3, 2**70, -(2**70), 10**5000, -(10**5000))
    yield from (1.5, math.nan)
    yield from (math.inf, -math.inf, 1j, "", "x", "\xe9\0", "\ud800", "x" * 5000, b"x")
    yield from ([], [1], [None], {}, {"a": 1}, {2: "a"}, (), (1, 2), {1}, frozenset())
    yield from (object(), Unspeakable(), Ellipsis, range(3), Path("nope"))
    yield from (np.float64(2), np.int64(-3), np.bool_(True), np.array([1, 2]))
    yield from (np.zeros((0,)), np.array("a"), np.array([object()]), np.array(3))
    yield from (iter([1]), (i for i in (1, 2)), mpidist.ReduceOp.SUM, np.dtype("f4"))
    yield mpidist.PerReplica((1,))


class Place:
    """What the calls below need: a strategy, and things made under it."""

    def __init__(self, strategy, folder):
        self.strategy = strategy
        self.folder = folder
        with strategy.scope():
            self.variable = mpidist.Variable(np.zeros(2))
        self.checkpoint = mpidist.Checkpoint(strategy=strategy, w=self.variable)
        self.manager = mpidist.CheckpointManager(self.checkpoint, folder / "run", 2)

    def new_variable(self, initial_value=0.0, **options):
        with self.strategy.scope():
            return mpidist.Variable(initial_value, **options)

    def new_manager(self, **options):
        options = {"directory": self.folder / "other", "max_to_keep": 2} | options
        return mpidist.CheckpointManager(self.checkpoint, **options)

    def new_handler(self, manager, config=None):
        mpidist.PreemptionCheckpointHandler(None, manager, None, config).close()

    def write(self, path=None, rows=None, **options):
        path = self.folder / "rows.h5" if path is None else path
        rows = np.ones((2, 1)) if rows is None else rows
        options = {"overwrite": True} | options
        with mpidist.Hdf5Writer(self.strategy, path, **options) as writer:
            writer.append(rows)

    def new_strategy(self, devices=("CPU:0",), **options):
        options = {"communicator": MPI.COMM_SELF} | options
        mpidist.MirroredStrategy(devices, **options).experimental_finalize()

    def put(self, key):
        buckets = self.strategy.gradient_buckets({"a": np.ones(2)})
        try:
            with buckets:
                buckets.put("a", np.ones(2))
                buckets.put(key, np.ones(2))
        finally:
            buckets.close()

    def read(self, files="rows.h5", datasets="x"):
        self.first(Dataset.from_hdf5(files, datasets))

    def iterator(self):
        return iter(self.strategy.experimental_distribute_dataset(rows(2).batch(1)))

    def first(self, dataset):
        return list(itertools.islice(dataset, 3))


def rows(n=7):
    return Dataset.range(n)


# What is called, with the name of the argument, or names one of which an error says
OPTIONS = {
    "CommunicationOptions": "bytes_per_pack timeout_seconds implementation "
    "reproducible compression",
    "InputOptions": "experimental_fetch_to_device experimental_replication_mode "
    "experimental_place_dataset_on_device experimental_per_replica_buffer_size",
    "Options": "auto_shard_policy",
    "RunOptions": "experimental_enable_dynamic_batch_size "
    "experimental_bucketizing_dynamic_shape",
    "TerminationConfig": "termination_watcher_fn exit_fn grace_period save_fn",
    "InputContext": "num_input_pipelines input_pipeline_id num_replicas_in_sync",
}
MANAGER = (
    "directory max_to_keep keep_checkpoint_every_n_hours checkpoint_name step_counter "
    "checkpoint_interval init_fn keep_every is_background"
)
STRATEGY = "devices cross_device_ops communicator allow_shared_gpu cuda_aware"
WRITER = "path dataset chunk_rows compression compression_level shuffle overwrite"
CALLS = {
    f"{name} {field}": lambda p, j, name=name, field=field: getattr(mpidist, name)(
        **{field: j}
    )
    for name, fields in OPTIONS.items()
    for field in fields.split()
}
CALLS |= {
    f"Variable {name}": lambda p, j, name=name: p.new_variable(**{name: j})
    for name in ("name", "trainable", "dtype", "synchronization", "aggregation")
}
CALLS |= {
    f"CheckpointManager {name}": lambda p, j, name=name: p.new_manager(**{name: j})
    for name in MANAGER.split()
}
CALLS |= {
    f"Hdf5Writer {name}": lambda p, j, name=name: p.write(**{name: j})
    for name in WRITER.split()
}
CALLS |= {
    f"MirroredStrategy {name}": lambda p, j, name=name: p.new_strategy(**{name: j})
    for name in STRATEGY.split()
}
CALLS |= {
    "batch_size": lambda p, j: p.first(rows().batch(j)),
    "drop_remainder": lambda p, j: p.first(rows().batch(2, j)),
    "shuffle buffer_size": lambda p, j: p.first(rows().shuffle(j)),
    "seed": lambda p, j: p.first(rows().shuffle(seed=j)),
    "reshuffle_each_iteration": lambda p, j: p.first(
        rows().shuffle(reshuffle_each_iteration=j)
    ),
    "window_chunks": lambda p, j: p.first(rows().shuffle(window_chunks=j)),
    "repeat count": lambda p, j: p.first(rows().repeat(j)),
    "take count": lambda p, j: p.first(rows().take(j)),
    "skip count": lambda p, j: p.first(rows().skip(j)),
    "num_shards": lambda p, j: p.first(rows().shard(j, 0)),
    "index": lambda p, j: p.first(rows().shard(2, j)),
    "map_func": lambda p, j: p.first(rows().map(j)),
    "num_parallel_calls": lambda p, j: p.first(rows().map(abs, j)),
    "prefetch buffer_size": lambda p, j: p.first(rows().prefetch(j)),
    "options": lambda p, j: rows().with_options(j),
    "zip": lambda p, j: p.first(Dataset.zip(rows(), j)),
    "predicate": lambda p, j: p.first(rows().filter(j)),
    "result of the predicate": lambda p, j: p.first(rows().filter(lambda x: j)),
    "enumerate start": lambda p, j: p.first(rows().enumerate(j)),
    "interleave map_func": lambda p, j: p.first(rows().interleave(j)),
    "result of map_func": lambda p, j: p.first(rows().interleave(lambda x: j)),
    "cycle_length": lambda p, j: p.first(rows().interleave(lambda x: rows(), j)),
    "block_length": lambda p, j: p.first(rows().interleave(lambda x: rows(), 1, j)),
    "interleave num_parallel_calls": lambda p, j: p.first(
        rows().interleave(lambda x: rows(), 1, 1, j)
    ),
    "deterministic": lambda p, j: rows().interleave(abs, deterministic=j),
    "reduce_func": lambda p, j: rows().reduce(0, j),
    "distributed reduce_func": lambda p, j: p.strategy.experimental_distribute_dataset(
        rows().batch(2)
    ).reduce(0, j),
    "element_spec": lambda p, j: mpidist.Optional.empty(j),
    "session_config": lambda p, j: p.strategy.configure(j),
    "cluster_spec": lambda p, j: p.strategy.configure(None, j),
    "numpy_input|from_tensor_slices": lambda p, j: (
        p.strategy.experimental_make_numpy_dataset(j)
    ),
    "concatenate|once": lambda p, j: rows().batch(2).concatenate(j),
    "stop": lambda p, j: p.first(Dataset.range(j)),
    "start": lambda p, j: p.first(Dataset.range(j, 5)),
    "step": lambda p, j: p.first(Dataset.range(0, 5, j)),
    "output_type": lambda p, j: Dataset.range(5, output_type=j),
    "from_tensor_slices": lambda p, j: p.first(Dataset.from_tensor_slices(j)),
    "generator|once|element": lambda p, j: p.first(Dataset.from_generator(j)),
    "files|/nope|x": lambda p, j: p.read(files=j),
    "datasets|rows.h5": lambda p, j: p.read(datasets=j),
    "experimental_distribute_dataset|once": lambda p, j: (
        p.strategy.experimental_distribute_dataset(j)
    ),
    "as rows seed": lambda p, j: p.strategy.experimental_distribute_dataset(
        rows().shuffle(seed=j).batch(2)
    ),
    "distribute options": lambda p, j: p.strategy.experimental_distribute_dataset(
        rows().batch(2), j
    ),
    "dataset_fn": lambda p, j: p.strategy.distribute_datasets_from_function(j),
    "from_function options": lambda p, j: p.strategy.distribute_datasets_from_function(
        lambda context: rows().batch(2), j
    ),
    "value_fn": lambda p, j: p.strategy.experimental_distribute_values_from_function(j),
    "make_dataset_iterator|once": lambda p, j: p.strategy.make_dataset_iterator(j),
    "input_fn": lambda p, j: p.strategy.make_input_fn_iterator(j),
    "replication_mode": lambda p, j: p.strategy.make_input_fn_iterator(
        lambda context: rows().batch(2), j
    ),
    "input_iterator": lambda p, j: p.strategy.experimental_run(lambda *a: None, j),
    "global_batch_size": lambda p, j: mpidist.InputContext().get_per_replica_batch_size(
        j
    ),
    "reduce_op": lambda p, j: p.strategy.reduce(j, 1.0),
    "reduce value": lambda p, j: p.strategy.reduce("SUM", j),
    "reduce axis": lambda p, j: p.strategy.reduce("SUM", np.ones((2, 2)), axis=j),
    "gather value": lambda p, j: p.strategy.gather(j, axis=0),
    "gather axis": lambda p, j: p.strategy.gather(np.ones((2, 2)), axis=j),
    "all_reduce bytes_per_pack": lambda p, j: p.strategy.extended.all_reduce(
        "SUM", 1.0, mpidist.CommunicationOptions(bytes_per_pack=j)
    ),
    "all_reduce options": lambda p, j: p.strategy.extended.all_reduce("SUM", 1.0, j),
    "all_gather options": lambda p, j: p.strategy.extended.all_gather(np.ones(2), 0, j),
    "destinations": lambda p, j: p.strategy.extended.reduce_to("SUM", 1.0, j),
    "value_destination_pairs": lambda p, j: p.strategy.extended.batch_reduce_to(
        "SUM", j
    ),
    "symmetric_like|value": lambda p, j: p.strategy.symmetric_like(j),
    "GradientBuckets|gradient|value": lambda p, j: p.strategy.gradient_buckets(
        j
    ).close(),
    "buckets reduce_op": lambda p, j: p.strategy.gradient_buckets(
        [np.ones(2)], j
    ).close(),
    "buckets options": lambda p, j: p.strategy.gradient_buckets(
        [np.ones(2)], "SUM", j
    ).close(),
    "put key|gradient": lambda p, j: p.put(j),
    "run fn": lambda p, j: p.strategy.run(j),
    "run args": lambda p, j: p.strategy.run(lambda *a: None, args=j),
    "run kwargs": lambda p, j: p.strategy.run(lambda **k: None, kwargs=j),
    "run options": lambda p, j: p.strategy.run(lambda: 1, options=j),
    "merge_fn": lambda p, j: p.strategy.run(
        lambda: mpidist.get_replica_context().merge_call(j)
    ),
    "merge_call args": lambda p, j: p.strategy.run(
        lambda: mpidist.get_replica_context().merge_call(lambda *a: None, j)
    ),
    "update": lambda p, j: p.strategy.extended.update(j, lambda v: v),
    "update fn": lambda p, j: p.strategy.extended.update(p.variable, j),
    "update args": lambda p, j: p.strategy.extended.update(
        p.variable, lambda *a: None, j
    ),
    "update kwargs": lambda p, j: p.strategy.extended.update(
        p.variable, lambda *a, **k: None, kwargs=j
    ),
    "update_non_slot fn": lambda p, j: p.strategy.extended.update_non_slot(None, j),
    "colocate_vars_with": lambda p, j: p.strategy.extended.colocate_vars_with(j),
    "steps iterations|ended": lambda p, j: (
        p.strategy.extended.experimental_run_steps_on_iterator(
            lambda *a: None, p.iterator(), j
        )
    ),
    "steps iterator": lambda p, j: (
        p.strategy.extended.experimental_run_steps_on_iterator(lambda *a: None, j)
    ),
    "initial_value": lambda p, j: p.new_variable(j),
    "assign|Variable_0|value": lambda p, j: p.variable.assign(j),
    "IndexedSlices": lambda p, j: p.variable.scatter_add(j),
    "Checkpoint strategy": lambda p, j: mpidist.Checkpoint(strategy=j),
    "shard_bytes": lambda p, j: mpidist.Checkpoint(strategy=p.strategy, shard_bytes=j),
    "Checkpoint object": lambda p, j: mpidist.Checkpoint(
        strategy=p.strategy, object=j
    ).write("object"),
    "save file_prefix|nope|x": lambda p, j: p.checkpoint.save(j),
    "write file_prefix|nope|x": lambda p, j: p.checkpoint.write(j),
    "restore save_path|nope|x|3": lambda p, j: p.checkpoint.restore(j),
    "read save_path|nope|x|3": lambda p, j: p.checkpoint.read(j),
    "is_partial": lambda p, j: p.checkpoint.read(p.manager.save(), is_partial=j),
    "CheckpointManager checkpoint": lambda p, j: mpidist.CheckpointManager(j, "a", 2),
    "checkpoint_number": lambda p, j: p.manager.save(j),
    "check_interval": lambda p, j: p.manager.save(check_interval=j),
    "checkpoint_dir|nope|x": lambda p, j: mpidist.latest_checkpoint(j),
    "checkpoint_name": lambda p, j: mpidist.latest_checkpoint(
        p.folder, checkpoint_name=j
    ),
    "checkpoint_or_checkpoint_manager": lambda p, j: p.new_handler(j),
    "termination_config": lambda p, j: p.new_handler(p.manager, j),
    "Hdf5Writer a strategy": lambda p, j: mpidist.Hdf5Writer(j, "a.h5"),
    "append|dataset": lambda p, j: p.write(rows=j),
    "set_state|state": lambda p, j: iter(
        p.strategy.experimental_distribute_dataset(rows().batch(2))
    ).set_state(j),
    "shape": lambda p, j: mpidist.TensorSpec(j, "f4"),
    "dtype": lambda p, j: mpidist.TensorSpec((), j),
    "train": lambda p, j: mpidist.run_elastic(j),
    "make_strategy": lambda p, j: mpidist.run_elastic(lambda s: 1, j),
    "min_replicas": lambda p, j: mpidist.run_elastic(
        lambda s: 1, lambda communicator: 1, min_replicas=j
    ),
    "values": lambda p, j: mpidist.PerReplica(j),
    "replica_ids|replica ids": lambda p, j: mpidist.PerReplica((1,), j),
    "HierarchicalCopyAllReduce num_packs": lambda p, j: (
        mpidist.HierarchicalCopyAllReduce(j)
    ),
    "NcclAllReduce num_packs": lambda p, j: mpidist.NcclAllReduce(j),
    "reduce_to_device": lambda p, j: mpidist.ReductionToOneDevice(j),
    "accumulation_fn": lambda p, j: mpidist.ReductionToOneDevice(None, j),
    "experimental_set_strategy|strategy": lambda p, j: (
        mpidist.experimental_set_strategy(j)
    ),
    "config_proto": lambda p, j: p.strategy.update_config_proto(j),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A strategy of this rank alone, in a folder of its own."""
    folder = tmp_path_factory.mktemp("place")
    with h5py.File(folder / "rows.h5", "w") as file:
        file["x"] = np.zeros(3)
    former = Path.cwd()
    os.chdir(folder)
    strategy = mpidist.MirroredStrategy(["CPU:0"], communicator=MPI.COMM_SELF)
    yield Place(strategy, folder)
    strategy.experimental_finalize()
    os.chdir(former)


def complaint(name, place, value):
    """What is wrong with how a call takes a value; None if nothing is."""
    try:
        CALLS[name](place, value)
    except mpidist.MpidistError as error:
        text = str(error)
    except Exception as error:
        return f"{validation.shown(value)}: {type(error).__name__}: {error}"
    else:
        return None
    if not re.search(name.rpartition(" ")[2], text):
        return f"{validation.shown(value)}: it is not named in {text!r}"
    return (
        None if len(text) < 3000 else f"{validation.shown(value)}: {len(text)} letters"
    )


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_used_is_named(comm, place, name):
    complaints = [complaint(name, place, value) for value in junk()]
    assert not list(filter(None, complaints))
    mpidist.experimental_set_strategy(None)


def outcome(call):
    """Return what a call refuses, or None, and what it returns."""
    try:
        return None, call()
    except (
        mpidist.ArgumentError,
        mpidist.ArgumentTypeError,
        mpidist.LaunchError,
    ) as error:
        return str(error), None


# Each is made with 7 elements, and has some of them at most
NUMBERS = {
    "batch_size": lambda n: Dataset.range(7).batch(n),
    "buffer_size": lambda n: Dataset.range(7).prefetch(n),
    "count": lambda n: Dataset.range(7).take(n),
    "num_shards": lambda n: Dataset.range(7).shard(n, 0),
    "num_parallel_calls": lambda n: Dataset.range(7).map(lambda x: x, n),
    "stop": lambda n: Dataset.range(n).take(7),
}


@PURE
@given(st.sampled_from(sorted(NUMBERS)), st.integers() | st.floats() | st.text())
def test_numbers_of_datasets(name, value):
    text, elements = outcome(lambda: list(NUMBERS[name](value)))
    if text is None:
        assert type(value) is int
        assert len(elements) <= 7
    else:
        assert text.startswith(f"{name} must")
        assert validation.shown(value) in text


@PURE
@given(st.integers() | st.floats() | st.text() | st.none())
def test_deadlines(value):
    is_number = isinstance(value, int | float)
    if value is None or (is_number and value > 0):
        options = mpidist.CommunicationOptions(timeout_seconds=value)
        assert options.timeout_seconds == value
    else:
        kind = mpidist.ArgumentError if is_number else mpidist.ArgumentTypeError
        with pytest.raises(kind, match=r"^timeout_seconds must be") as info:
            mpidist.CommunicationOptions(timeout_seconds=value)
        assert str(info.value).endswith(f"not {value!r}")


def test_options_are_alike_however_they_are_given():
    """The ranks compare them as text."""
    options = mpidist.CommunicationOptions(
        bytes_per_pack=np.int64(8),
        timeout_seconds=np.float32(2),
        reproducible=np.bool_(True),
    )
    assert repr(options) == repr(mpidist.CommunicationOptions(8, 2.0, "AUTO", True))


@PURE
@given(st.text() | st.binary() | st.lists(st.integers()))
def test_paths(value):
    text, path = outcome(lambda: validation.path("path", value))
    if text is None:
        assert path == os.fsdecode(value)
    else:
        is_bad = isinstance(value, list) or not value
        assert is_bad or ("\0" if isinstance(value, str) else b"\0") in value
        assert text.startswith("path must be a path")


def test_long_values_are_cut_short():
    for value in ("x" * 10**6, list(range(10**6)), 10**4000, {"x": "y" * 10**6}):
        assert len(validation.shown(value)) < 500
    assert validation.shown(10**5000).startswith("<int")
    assert "Unspeakable" in validation.shown(Unspeakable())


# Collective calls, with what one rank alone gives them
COLLECTIVE = {
    "reduce_op": lambda s, j: s.reduce(j or "SUM", 1.0),
    "reduce value": lambda s, j: s.reduce("SUM", j or 1.0),
    "axis": lambda s, j: s.gather(np.ones(2), axis=j or 0),
    "options": lambda s, j: s.extended.all_reduce("SUM", 1.0, j),
    "gather options": lambda s, j: s.extended.all_gather(np.ones(2), 0, j),
    "destinations": lambda s, j: s.extended.reduce_to("SUM", 1.0, j or "CPU:0"),
    "fn": lambda s, j: s.run(j or np.zeros, (2,)),
    "kwargs": lambda s, j: s.run(lambda: all_reduce(), kwargs=j),
    "run options": lambda s, j: s.run(lambda: all_reduce(), options=j),
    "merge_fn": lambda s, j: s.run(lambda: merge(j or (lambda s: None))),
    "dataset_fn": lambda s, j: s.distribute_datasets_from_function(j or batches),
    "from_function options": lambda s, j: s.distribute_datasets_from_function(
        batches, j
    ),
    "distribute options": lambda s, j: s.experimental_distribute_dataset(batches(), j),
    "value_fn": lambda s, j: s.experimental_distribute_values_from_function(
        j or (lambda context: 1)
    ),
    "input_fn": lambda s, j: s.make_input_fn_iterator(j or batches),
    "input_iterator": lambda s, j: s.experimental_run(all_reduce, j),
    "buckets options": lambda s, j: s.gradient_buckets([np.ones(2)], "SUM", j),
    "dtype": lambda s, j: new_variable(s, dtype=j or "f4"),
    "name": lambda s, j: new_variable(s, name=j),
    "file_prefix": lambda s, j: mpidist.Checkpoint(strategy=s, x=1).save(j or "a"),
    "save_path": lambda s, j: mpidist.Checkpoint(strategy=s, x=1).read(j or "a"),
    "max_to_keep": lambda s, j: mpidist.CheckpointManager(
        mpidist.Checkpoint(strategy=s, x=1), "run", j or 2
    ),
    "checkpoint_number": lambda s, j: mpidist.CheckpointManager(
        mpidist.Checkpoint(strategy=s, x=1), "run", 2
    ).save(j),
    "termination_config": lambda s, j: mpidist.PreemptionCheckpointHandler(
        None,
        mpidist.CheckpointManager(mpidist.Checkpoint(strategy=s), "run", 2),
        None,
        j,
    ),
    "checkpoint_dir": lambda s, j: mpidist.PreemptionCheckpointHandler(
        None, mpidist.CheckpointManager(mpidist.Checkpoint(strategy=s), "run", 2), j
    ),
    "overwrite": lambda s, j: mpidist.Hdf5Writer(s, "rows.h5", overwrite=j or False),
    "get_next": lambda s, j: s.extended.experimental_run_steps_on_iterator(
        lambda *a: None, j or iter(s.experimental_distribute_dataset(batches()))
    ),
}


def all_reduce():
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)


def merge(fn):
    return mpidist.get_replica_context().merge_call(fn)


def batches(context=None):
    return Dataset.range(8).batch(2)


def new_variable(strategy, **options):
    with strategy.scope():
        return mpidist.Variable(1.0, **options)


@pytest.mark.parametrize("name", COLLECTIVE)
def test_what_one_rank_gives_is_refused_on_all(
    strategy, comm, monkeypatch, mpi_tmp_path, name
):
    monkeypatch.chdir(mpi_tmp_path)
    for rank in range(comm.size):
        for value in ({3: "x"}, object()):
            kinds = (mpidist.ArgumentError, mpidist.ArgumentTypeError)
            with pytest.raises(kinds, match=name.rpartition(" ")[2]) as info:
                COLLECTIVE[name](strategy, value if comm.rank == rank else None)
            assert comm.size == 1 or info.value.origin_rank == rank
            assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.parametrize("name", ["devices", "cuda_aware", "allow_shared_gpu"])
def test_what_one_rank_gives_to_a_strategy_is_refused_on_all(comm, name):
    mine = {name: object()} if comm.rank == comm.size - 1 else {}
    with pytest.raises(mpidist.ArgumentTypeError, match=name):
        mpidist.MirroredStrategy(communicator=comm, **mine)


def test_a_communicator_that_was_freed_is_refused():
    comm = MPI.COMM_SELF.Dup()
    comm.Free()
    with pytest.raises(mpidist.ArgumentError, match=r"communicator must not be .*NULL"):
        mpidist.MirroredStrategy(communicator=comm)


@pytest.mark.parametrize("name", [f"MPIDIST_{name}" for name in SWITCHES.split()])
@pytest.mark.parametrize(
    "text", ["yes please", "2", "true", " 1", "-1", "01", "\u0661"]
)
def test_variables_that_are_not_0_or_1_are_refused_on_all(
    comm, monkeypatch, name, text
):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv(name, text)
    with pytest.raises(
        mpidist.LaunchError, match=f"{name} must be 0 or 1, not '{text}"
    ):
        mpidist.MirroredStrategy(communicator=comm)


@pytest.mark.parametrize("name", [f"MPIDIST_{name}" for name in SWITCHES.split()])
@pytest.mark.parametrize("text", ["", "0", "1"])
def test_variables_that_are_0_or_1_or_empty(comm, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    strategy = mpidist.MirroredStrategy(["CPU:0"], communicator=comm)
    assert strategy.reduce("SUM", 1) == comm.size
    strategy.experimental_finalize()
    (setting,) = (setting for setting in SETTINGS if setting.name == name)
    assert setting.read() == (setting.default if text == "" else text == "1")


def test_one_process_on_purpose_needs_a_1():
    environ = {"SLURM_STEP_NUM_TASKS": "4", "MPIDIST_ALLOW_SINGLETON": "yes please"}
    with pytest.raises(mpidist.LaunchError, match="ALLOW_SINGLETON must be 0 or 1"):
        check_launch(environ, 1, "MPICH Version: 5")
    with pytest.raises(mpidist.LaunchError, match="MPI sees one"):
        check_launch(environ | {"MPIDIST_ALLOW_SINGLETON": ""}, 1, "MPICH Version: 5")


@PURE
@given(st.text() | st.floats().map(str) | st.integers().map(str))
def test_seconds_to_wait_for_others(text):
    refused, seconds = outcome(lambda: hang_seconds({"MPIDIST_HANG_SECONDS": text}))
    if refused is None:
        assert seconds > 0
        assert seconds == (float(text or 1800) or math.inf)
    else:
        assert refused.startswith("MPIDIST_HANG_SECONDS must be a number of seconds")


def test_no_number_of_ranks_per_node_is_all_of_them(comm, monkeypatch, make_strategy):
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "")
    strategy = make_strategy(["CPU:0"])
    assert strategy.extended.topology.node.size == comm.size


# Files of transports that are none
TABLES = {
    "empty": "",
    "text": "no JSON",
    "a list": "[]",
    "null": "null",
    "of another format": '{"format": 2, "tables": []}',
    "of no tables": '{"format": 1}',
    "of a number": '{"format": 1, "tables": 3}',
    "deep": "[" * 100_000,
    "binary": b"\xff\xfe\0",
    "endless": json.dumps(
        {
            "format": 1,
            "tables": [
                {
                    "mpi": "x",
                    "node_sizes": [1],
                    "device": "CPU",
                    "table": {"allreduce": [[math.inf, "mpi"]]},
                }
            ],
        }
    ),
}


@pytest.fixture(params=[*TABLES, "a folder", "a pipe", "too long"])
def bad_table(request, tmp_path):
    path = tmp_path / "transports.json"
    if request.param == "a folder":
        path.mkdir()
    elif request.param == "a pipe":  # which to read would never end
        os.mkfifo(path)
    elif request.param == "too long":
        path = tmp_path / ("x" * 300)
    else:
        content = TABLES[request.param]
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_of_no_transports_is_named(bad_table, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRANSPORTS", str(bad_table))
    with pytest.raises(mpidist.LaunchError, match="transports") as info:
        find_table(bad_table, Layout("MPICH", (1,), "CPU"))
    assert "MPIDIST_TRANSPORTS" in str(info.value)
    assert str(bad_table) in str(info.value)


@pytest.mark.mpi(min_size=2)
def test_a_file_of_no_transports_is_refused_on_all(comm, bad_table, monkeypatch):
    monkeypatch.setenv("MPIDIST_TRANSPORTS", str(bad_table))
    with pytest.raises(mpidist.LaunchError, match=r"MPIDIST_TRANSPORTS"):
        mpidist.MirroredStrategy(["CPU:0"], communicator=comm)


@pytest.mark.mpi(min_size=2)
def test_calls_that_cannot_be_kept_are_a_warning(comm, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("this is no folder")
    for text in (str(file), str(file / "folder"), "x" * 5000):
        monkeypatch.setenv("MPIDIST_DUMPS", text)
        with pytest.warns(RuntimeWarning, match="MPIDIST_DUMPS"):
            strategy = mpidist.MirroredStrategy(["CPU:0"], communicator=comm)
        assert strategy.reduce("SUM", 1) == comm.size
        strategy.experimental_finalize()


RESOLVER = (
    "jobs port_base gpus_per_node|GPUs gpus_per_task|GPUs tasks_per_node auto_set_gpu"
)


@pytest.mark.parametrize("name", RESOLVER.split())
def test_what_a_resolver_cannot_use_is_named(monkeypatch, name):
    for variable, text in {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }.items():
        monkeypatch.setenv(variable, text)
    argument = name.partition("|")[0]
    values = [*junk(), {"worker": "2"}, {"worker": -1}, {"worker": 2.0}]
    for value in values:
        text, _ = outcome(lambda j=value: mpidist.SlurmClusterResolver(**{argument: j}))
        assert text is None or re.search(f"{name}|tasks", text)
