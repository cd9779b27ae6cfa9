"""Divided datasets whose batches go to a device: of threads here, or a GPU."""

import gc
import threading

import h5py
import numpy as np
import pytest
from all_ranks import local
from datasets import numbers, reading_ahead
from thread_streams import DeviceArray, ThreadCopyStream

import mpidist
from mpidist import Dataset, InputOptions
from mpidist.data.distributed import reader
from mpidist.data.distributed.reader import Prefetcher
from mpidist.device import arrays, binding, streams

DEPTHS = [0, 1, 3]
MESSAGE = "damaged on purpose"


@pytest.fixture(params=[False, True], ids=["prompt", "late"])
def stream(request, monkeypatch):
    """The copies to a device that all replicas are said to have."""
    stream = ThreadCopyStream(late=request.param, late_here=request.param)
    monkeypatch.setattr(streams, "copy_stream", lambda device: stream)
    yield stream
    stream.end()


def in_file(path, n):
    """Rows in a file, of which several steps are read at a time."""
    with h5py.File(path / "x.h5", "w") as file:
        file["x"] = np.arange(n)
    return Dataset.from_hdf5(path / "x.h5", "x")


def on_host(stream, array):
    assert isinstance(array, DeviceArray)
    stream.here.synchronize()
    return array.view(np.ndarray)


def mine(strategy, stream, batches):
    """This replica's rows of every step; all is computed late."""
    kept = [local(strategy, batch) for batch in batches]
    return [on_host(stream, array).tolist() for array in kept]


def in_order(strategy, comm, stream, batches):
    """The rows of all ranks, in their order."""
    parts = zip(*comm.allgather(mine(strategy, stream, batches)))
    return [x for ranks in parts for part in ranks for x in part]


def require_all_returned(stream):
    for thread in threading.enumerate():
        if thread.name.startswith("mpidist"):
            thread.join(600)
    assert stream.host.is_all_free
    assert stream.device.is_all_free


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "build",
    [
        lambda rows: rows.batch(4),
        lambda rows: rows.map(lambda x: x, 2).batch(4),
        lambda rows: rows.batch(4).map(lambda x: x, num_parallel_calls=3),
        lambda rows: Dataset.from_generator(lambda: iter(np.arange(30))).batch(4),
    ],
    ids=["arrays", "map-of-rows", "map-of-batches", "generator"],
)
def test_all_rows_arrive_in_order_in_every_epoch(strategy, comm, stream, depth, build):
    dataset = build(numbers(30))
    divided = strategy.experimental_distribute_dataset(dataset, reading_ahead(depth))
    for _ in range(3):
        assert in_order(strategy, comm, stream, divided) == list(range(30))
        require_all_returned(stream)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("batch", [4, 40])
def test_steps_that_are_read_at_a_time_arrive(
    strategy, comm, stream, tmp_path, depth, batch
):
    dataset = in_file(tmp_path, 300).batch(batch)
    divided = strategy.experimental_distribute_dataset(dataset, reading_ahead(depth))
    for _ in range(3):
        assert in_order(strategy, comm, stream, divided) == list(range(300))
        require_all_returned(stream)
    iterator = iter(divided)
    state = [next(iterator), iterator.get_state()][1]
    iterator.set_state(state)
    assert in_order(strategy, comm, stream, iterator) == list(range(batch, 300))


def test_too_little_memory_for_handing_out_is_an_error_on_all(
    strategy, comm, stream, monkeypatch, tmp_path
):
    monkeypatch.setattr(strategy.extended.topology, "devices", ("GPU:0",) * comm.size)
    dataset = in_file(tmp_path, 32).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    batches = [next(iterator), next(iterator)]

    def fail(*args):
        raise MemoryError("the device is full")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(stream, "fetch", fail)
        with pytest.raises(MemoryError, match="the device is full"):
            next(iterator)
    batches += list(iterator)
    assert in_order(strategy, comm, stream, batches) == list(range(32))
    gc.collect()  # the tracebacks
    require_all_returned(stream)


def test_too_little_memory_for_one_batch_of_many_is_met_at_that_batch(
    strategy, comm, stream, tmp_path
):
    pinned = []

    def pin(size, pin=stream.pin):
        pinned.append(size)
        if len(pinned) == 3 and comm.rank == 0:  # others may get no rows
            raise MemoryError("the host is full")
        return pin(size)

    stream.pin = pin
    dataset = in_file(tmp_path, 32).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    batches = [next(iterator), next(iterator)]
    with pytest.raises(MemoryError, match="the host is full"):
        next(iterator)
    batches += list(iterator)
    assert in_order(strategy, comm, stream, batches) == list(range(32))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("chunks", [None, (3, 50_000), (2, 20_000), "gzip"])
@pytest.mark.parametrize("files", [1, 3])
def test_large_rows_of_files_arrive_as_they_were_read(
    strategy, comm, stream, tmp_path, depth, chunks, files
):
    n, length = 24, 50_000
    rows = np.arange(n)[:, None] * length + np.arange(length)
    options = {"chunks": chunks}
    if chunks == "gzip":
        options = {"chunks": (5, length), "compression": "gzip"}
    paths = [tmp_path / f"{i}.h5" for i in range(files)]
    for part, path in zip(np.array_split(rows, files), paths, strict=True):
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=part, **options)
            file["number"] = part[:, 0]
    data = Dataset.from_hdf5(paths, ["x", "number"]).shuffle(seed=1).batch(12)
    divided = strategy.experimental_distribute_dataset(data, reading_ahead(depth))
    for _ in range(2):
        kept = list(divided)
        found = []
        for batch in kept:
            x, number = (on_host(stream, local(strategy, leaf)) for leaf in batch)
            np.testing.assert_array_equal(x, rows[number // length])
            found.extend((number // length).tolist())
        total = [x for part in comm.allgather(found) for x in part]
        assert sorted(total) == list(range(n))
    # None of it was packed
    assert set(stream.sent) & {8 * length * i for i in range(1, 13)}
    assert max(s for s in stream.sent if s % (8 * length)) <= 4096


def test_text_stays_on_the_host(strategy, comm, stream):
    n = comm.size
    rows = {"text": np.array(["a", "b"] * n), "x": np.arange(2 * n)}
    dataset = Dataset.from_tensor_slices(rows).batch(2 * n)
    (batch,) = strategy.experimental_distribute_dataset(dataset)
    assert local(strategy, batch["text"]).tolist() == ["a", "b"]
    assert type(local(strategy, batch["text"])) is np.ndarray
    assert on_host(stream, local(strategy, batch["x"])).tolist() == [
        2 * comm.rank,
        2 * comm.rank + 1,
    ]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_closing_gives_all_memory_back(strategy, stream, depth, steps):
    iterator = iter(
        strategy.experimental_distribute_dataset(
            numbers(80).batch(4), reading_ahead(depth)
        )
    )
    kept = [next(iterator) for _ in range(steps)]
    iterator.close()
    require_all_returned(stream)
    assert len(mine(strategy, stream, kept)) == steps


@pytest.mark.parametrize("depth", DEPTHS)
def test_after_a_failure_the_step_can_be_read_again(strategy, comm, stream, depth):
    failed = []

    def fail_once(x):
        if (x == 9).any() and not failed:
            failed.append(x)
            raise OSError(MESSAGE)
        return x

    dataset = numbers(32).batch(4).map(fail_once)
    divided = strategy.experimental_distribute_dataset(dataset, reading_ahead(depth))
    iterator = iter(divided)
    batches = [next(iterator), next(iterator)]
    with pytest.raises(OSError, match=MESSAGE):
        next(iterator)
    batches += list(iterator)
    assert in_order(strategy, comm, stream, batches) == list(range(32))
    require_all_returned(stream)


def test_too_little_memory_on_one_rank_is_an_error_on_all(strategy, comm, stream):
    divided = strategy.experimental_distribute_dataset(numbers(32).batch(4))
    if comm.rank == 0:  # others may get no rows
        stream.host.limit = 0
    iterator = iter(divided)
    with pytest.raises(MemoryError):
        next(iterator)
    stream.host.limit = float("inf")
    assert in_order(strategy, comm, stream, iterator) == list(range(32))


def test_replicas_that_have_ended_get_batches_of_no_rows(strategy, comm, stream):
    def make(context):
        steps = 2 + context.input_pipeline_id
        return Dataset.from_generator(
            lambda: (np.full(2, step) for step in range(steps))
        ).batch(1)

    divided = strategy.distribute_datasets_from_function(make)
    shapes = [local(strategy, batch).shape for batch in divided]
    assert shapes == [(1, 2)] * (2 + comm.rank) + [(0, 2)] * (comm.size - 1 - comm.rank)


def test_arrays_stay_on_the_host_where_that_is_asked_for(strategy, stream):
    options = InputOptions(experimental_fetch_to_device=False)
    divided = strategy.experimental_distribute_dataset(numbers(9).batch(3), options)
    for batch in divided:
        assert type(local(strategy, batch)) is np.ndarray
    assert stream.host.blocks == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_on_a_cpu_batches_are_handed_out_as_they_were_read(
    strategy, monkeypatch, depth
):
    monkeypatch.setattr(reader.host_to_device, "Uploads", None)
    if strategy.extended.device != "CPU:0":
        pytest.skip("the replicas are on GPUs")
    read, original = [], Prefetcher.read
    monkeypatch.setattr(
        Prefetcher, "read", lambda *args: read.append(original(*args)) or read[-1]
    )
    divided = strategy.experimental_distribute_dataset(
        numbers(30).batch(3), reading_ahead(depth)
    )
    batches = [local(strategy, batch) for batch in divided]
    assert len(batches) == 10
    assert all(a is b.batch for a, b in zip(batches, read, strict=True))


# On a GPU


@pytest.fixture
def gpu_strategy(comm):
    pytest.importorskip("cupy")
    if not binding.gpu_count():
        pytest.skip("there is no GPU")
    strategy = mpidist.MirroredStrategy(devices=["GPU:0"], communicator=comm)
    yield strategy
    strategy.experimental_finalize()


@pytest.mark.gpu
@pytest.mark.parametrize("depth", DEPTHS)
def test_sums_of_batches_are_numpys(gpu_strategy, depth):
    strategy = gpu_strategy
    rows = np.random.default_rng(0).integers(0, 1000, (5000, 64))
    dataset = Dataset.from_tensor_slices((rows, rows.astype("f4"))).shuffle(seed=1)
    divided = strategy.experimental_distribute_dataset(
        dataset.batch(128), reading_ahead(depth)
    )
    for _ in range(2):
        whole, halves = 0, 0
        for x, y in divided:
            sums = strategy.run(lambda x, y: (x.sum(axis=0), y @ y.T), args=(x, y))
            whole = whole + strategy.reduce("SUM", sums[0])
            halves += len(local(strategy, sums[1]))
        np.testing.assert_array_equal(arrays.to_host(whole), rows.sum(axis=0))
        assert strategy.reduce("SUM", halves) == 5000


@pytest.mark.gpu
def test_batches_lie_on_the_gpu_and_text_does_not(gpu_strategy):
    import cupy

    rows = {"text": np.array(["a", "b"] * 8), "x": np.arange(16), "none": np.ones(16)}
    dataset = Dataset.from_tensor_slices(rows).batch(16)
    (batch,) = gpu_strategy.experimental_distribute_dataset(dataset)
    assert isinstance(local(gpu_strategy, batch["x"]), cupy.ndarray)
    assert isinstance(local(gpu_strategy, batch["text"]), np.ndarray)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", DEPTHS)
def test_kernels_on_another_stream_see_whole_batches(gpu_strategy, depth):
    import cupy

    strategy, n = gpu_strategy, 200_000
    dataset = numbers(40 * n).batch(n)
    options = reading_ahead(depth)
    results = []
    with cupy.cuda.Stream(non_blocking=True):
        for batch in strategy.experimental_distribute_dataset(dataset, options):
            array = local(strategy, batch)
            for _ in range(50):  # takes longer than the copies
                array = cupy.ascontiguousarray(array[::-1])
            results.append(array)
        results = [array.get() for array in results]
    shard = mpidist.util.shares.BatchShare(
        strategy.num_replicas_in_sync, strategy.extended.replica_id
    ).of(n)
    for step, result in enumerate(results):
        expected = np.arange(n)[shard] + step * n
        np.testing.assert_array_equal(result, expected)
