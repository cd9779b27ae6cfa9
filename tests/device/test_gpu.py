"""Strategies whose replicas are on GPUs, with NumPy as the oracle.

On a machine with one GPU the ranks share it.
"""

import gc
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import CommunicationOptions
from mpidist.comm.transports.tuning import (
    METHODS,
    Layout,
    find_table,
    short_name,
    write_table,
)
from mpidist.device import arrays
from mpidist.device.binding import gpu_count
from mpidist.device.streams import DeviceBuffer

pytestmark = pytest.mark.gpu
if gpu_count():
    import cupy
else:
    pytest.skip("needs a GPU and CuPy", allow_module_level=True)

OPTIONS = {
    "default": CommunicationOptions(),
    "MPI": CommunicationOptions(implementation="MPI"),
    "in packs": CommunicationOptions(bytes_per_pack=500),
    "in order": CommunicationOptions(reproducible=True),
    "with a deadline": CommunicationOptions(timeout_seconds=60),
    "MPI, with a deadline": CommunicationOptions(
        implementation="MPI", timeout_seconds=60
    ),
}
# What it adds up by kernels, and what stays below
COUNTS = [0, 1, 7, 10_000, 300_000]


@pytest.fixture
def strategy(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm, allow_shared_gpu=True)
    yield strategy
    strategy.experimental_finalize()


@pytest.fixture(params=OPTIONS)
def options(request):
    return OPTIONS[request.param]


def all_reduce(strategy, op, value, options=None):
    """Return this replica's all_reduce of its own value."""

    def step():
        return mpidist.get_replica_context().all_reduce(op, value, options)

    return strategy.experimental_local_results(strategy.run(step))[0]


def numbers(rank, count, dtype="f4"):
    return (np.arange(count) * (rank + 3) % 11 + rank).astype(dtype)


def require_equal(result, expected):
    assert isinstance(result, cupy.ndarray)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    np.testing.assert_array_equal(result.get(), expected)


def test_each_rank_has_a_gpu(comm, strategy):
    index = comm.rank % gpu_count()
    assert strategy.extended.device == f"GPU:{index}"
    assert strategy.extended.worker_devices == (f"GPU:{index}",)
    assert arrays.current_gpu() == index
    ids = [found.pci_bus_id for found in strategy.extended.gpus.identities]
    assert len(ids) == comm.size
    assert len(set(ids)) == min(comm.size, gpu_count())


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "i8", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_reductions(comm, strategy, options, dtype, op):
    for count in COUNTS:
        everyone = [numbers(rank, count, dtype) for rank in range(comm.size)]
        expected = np.sum(everyone, axis=0, dtype=dtype)
        if op == "MEAN":
            wide = "f8" if np.dtype(dtype).kind in "iu" else dtype
            expected = np.sum(everyone, axis=0, dtype=wide) / comm.size
            expected = expected.astype(wide)
        mine = cupy.asarray(everyone[comm.rank])
        require_equal(all_reduce(strategy, op, mine, options), expected)
        assert np.array_equal(mine.get(), everyone[comm.rank])


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("shape", [(), (1, 1), (2, 0, 3), (4, 1, 2)])
def test_shapes_stay(comm, strategy, options, op, shape):
    for _ in range(2):
        got = all_reduce(strategy, op, cupy.full(shape, comm.rank + 1.0), options)
        total = sum(range(1, comm.size + 1)) / (comm.size if op == "MEAN" else 1)
        require_equal(got, np.full(shape, total))


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_narrow_numbers_are_added_up_in_float32(comm, strategy, options, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(name if name == "float16" else ml_dtypes.bfloat16)
    values = [np.full(3000, 200 + rank).astype(dtype) for rank in range(comm.size)]
    expected = np.sum([v.astype("f4") for v in values], axis=0).astype(dtype)
    got = all_reduce(strategy, "SUM", cupy.asarray(values[comm.rank]), options)
    require_equal(got, expected)


def test_nests_with_arrays_on_both_sides(comm, strategy, options):
    def value(rank):
        return {
            "w": [numbers(rank, n).reshape(-1, 1) for n in (6, 0, 40_000)],
            "b": numbers(rank, 5, "f8"),
            "host": numbers(rank, 4),
            "count": rank + 1,
        }

    def place(value):
        return {
            "w": [cupy.asarray(w) for w in value["w"]],
            "b": cupy.asarray(value["b"])[::-1],
            "host": value["host"],
            "count": value["count"],
        }

    everyone = [value(rank) for rank in range(comm.size)]
    got = all_reduce(strategy, "SUM", place(everyone[comm.rank]), options)
    for j, w in enumerate(got["w"]):
        require_equal(w, np.sum([v["w"][j] for v in everyone], axis=0))
    require_equal(got["b"], np.sum([v["b"][::-1] for v in everyone], axis=0))
    assert type(got["host"]) is np.ndarray
    assert np.array_equal(got["host"], np.sum([v["host"] for v in everyone], axis=0))
    assert got["count"] == sum(range(1, comm.size + 1))


@pytest.mark.parametrize("layout", ["transposed", "strided", "reversed", "broadcast"])
def test_arrays_of_any_layout(comm, strategy, layout):
    change = {
        "transposed": lambda a: a.T,
        "strided": lambda a: a[:, ::3],
        "reversed": lambda a: a[::-1, ::-1],
        "broadcast": lambda a: cupy.broadcast_to(a[:1], a.shape),
    }[layout]
    host = {"broadcast": lambda a: np.broadcast_to(a[:1], a.shape)}.get(layout, change)
    everyone = [numbers(rank, 30 * 70).reshape(30, 70) for rank in range(comm.size)]
    mine = change(cupy.asarray(everyone[comm.rank]))
    expected = np.sum([host(value) for value in everyone], axis=0)
    require_equal(all_reduce(strategy, "SUM", mine), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gathers_of_uneven_lengths(comm, strategy, options, axis):
    def value(rank, width):
        shape = [3, 5, 4]
        shape[axis] = (rank * width) % 7
        return numbers(rank, int(np.prod(shape))).reshape(shape)

    def gather(nest):
        def step():
            return mpidist.get_replica_context().all_gather(nest, axis, options)

        return strategy.experimental_local_results(strategy.run(step))[0]

    for width in (0, 1, 5):
        everyone = [value(rank, width) for rank in range(comm.size)]
        expected = np.concatenate(everyone, axis=axis)
        require_equal(gather(cupy.asarray(everyone[comm.rank])), expected)
    nest = [everyone[comm.rank], everyone[comm.rank][:, :, :].astype("f8")]
    got = gather([cupy.asarray(part) for part in nest])
    require_equal(got[0], expected)
    require_equal(got[1], expected.astype("f8"))


def test_large_gathers(comm, strategy):
    everyone = [
        numbers(rank, (rank + 1) * 40_000).reshape(-1, 40) for rank in range(comm.size)
    ]
    got = strategy.gather(cupy.asarray(everyone[comm.rank]), axis=0)
    require_equal(got, np.concatenate(everyone))
    got = strategy.gather(cupy.asarray(everyone[comm.rank].T.copy()), axis=1)
    require_equal(got, np.concatenate(everyone).T)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", ["i4", "f4", "f2"])
def test_reductions_over_an_axis(comm, strategy, op, dtype):
    everyone = [numbers(rank, 6 * rank).reshape(-1, 6) for rank in range(comm.size)]
    rows = np.concatenate(everyone).astype("f8")
    with np.errstate(invalid="ignore"):
        expected = rows.sum(axis=0) if op == "SUM" else rows.sum(axis=0) / len(rows)
    got = strategy.reduce(op, cupy.asarray(everyone[comm.rank].astype(dtype)), axis=0)
    is_mean_of_integers = op == "MEAN" and dtype == "i4"
    require_equal(got, expected.astype("f8" if is_mean_of_integers else dtype))


def test_variables_are_on_the_gpu(comm, strategy):
    with strategy.scope():
        w = mpidist.Variable(
            np.arange(5.0), aggregation=mpidist.VariableAggregation.MEAN
        )
        seen = mpidist.Variable(
            0,
            synchronization=mpidist.VariableSynchronization.ON_READ,
            aggregation=mpidist.VariableAggregation.SUM,
        )

    def step():
        w.assign_add(cupy.full(5, comm.rank + 1.0))
        seen.assign_add(comm.rank)
        return cupy.asarray(w) * 2

    (doubled,) = strategy.experimental_local_results(strategy.run(step))
    expected = np.arange(5.0) + (comm.size + 1) / 2
    require_equal(doubled, expected * 2)
    assert np.array_equal(w.numpy(), expected)
    assert seen.numpy() == sum(range(comm.size))


class Numba:
    """An array that others know by CUDA's array interface alone."""

    def __init__(self, array):
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


class Exchanged:
    """An array that others know by DLPack alone."""

    def __init__(self, array):
        self.array = array
        self.__dlpack__, self.__dlpack_device__ = (
            array.__dlpack__,
            array.__dlpack_device__,
        )


@pytest.mark.parametrize("kind", [Numba, Exchanged])
def test_other_libraries_arrays_come_in_without_a_copy(comm, strategy, kind):
    given = kind(cupy.arange(4.0) + comm.rank)
    assert arrays.to_array(given).data.ptr == given.array.data.ptr
    expected = np.arange(4.0) * comm.size + sum(range(comm.size))
    require_equal(all_reduce(strategy, "SUM", given), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_torch_tensors_come_back_as_tensors(comm, strategy, dtype):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    device = f"cuda:{arrays.current_gpu()}"
    x = torch.ones((3, 4), dtype=getattr(torch, dtype), device=device)
    got = all_reduce(strategy, "SUM", x * (comm.rank + 1))
    assert isinstance(got, torch.Tensor)
    assert got.device == x.device
    assert got.dtype == x.dtype
    assert (got == sum(range(1, comm.size + 1))).all()
    assert strategy.gather(x, axis=1).shape == (3, 4 * comm.size)


def test_jax_arrays_come_back_as_jax_arrays(comm, strategy):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no CUDA")
    got = all_reduce(strategy, "SUM", jax.numpy.ones(5))
    assert isinstance(got, jax.Array)
    assert (np.asarray(got) == comm.size).all()


@pytest.mark.mpi(min_size=2)
def test_arrays_here_on_the_gpu_and_there_on_the_host_are_refused(comm, strategy):
    xp = cupy if comm.rank == 0 else np
    with pytest.raises(mpidist.MismatchError, match="on a GPU on rank 0"):
        strategy.reduce("SUM", xp.ones(3))
    require_equal(strategy.reduce("SUM", cupy.ones(3)), np.full(3, comm.size, "f8"))


@pytest.mark.mpi(min_size=2)
def test_arrays_on_a_gpu_are_refused_by_a_strategy_on_cpus(comm, make_strategy):
    strategy = make_strategy(["CPU:0"])
    with pytest.raises(mpidist.ArgumentError, match=r"value\['x'\] is on a GPU"):
        strategy.reduce("SUM", {"x": cupy.ones(3), "y": 1})
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_a_shared_gpu_is_refused_on_all_ranks(comm, monkeypatch):
    if gpu_count() >= comm.size:
        pytest.skip("each rank has a GPU of its own")
    monkeypatch.delenv("MPIDIST_ALLOW_SHARED_GPU", raising=False)
    with pytest.raises(mpidist.LaunchError, match=r"would share one GPU, .*: start"):
        mpidist.MirroredStrategy(communicator=comm)
    allowed = comm.rank > 0  # all must
    with pytest.raises(mpidist.LaunchError, match="would share one GPU"):
        mpidist.MirroredStrategy(communicator=comm, allow_shared_gpu=allowed)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("asked", [{"implementation": "NCCL"}, "NcclAllReduce"])
def test_nccl_is_refused_where_ranks_share_a_gpu(comm, strategy, asked):
    if gpu_count() >= comm.size:
        pytest.skip("each rank has a GPU of its own")
    with pytest.raises(mpidist.LaunchError, match=r"cannot be used: (ranks|CuPy)"):
        if asked == "NcclAllReduce":
            mpidist.MirroredStrategy(
                cross_device_ops=mpidist.NcclAllReduce(),
                communicator=comm,
                allow_shared_gpu=True,
            )
        else:
            all_reduce(strategy, "SUM", cupy.ones(2), CommunicationOptions(**asked))
    require_equal(all_reduce(strategy, "SUM", cupy.ones(1)), np.full(1, comm.size, "d"))


@pytest.mark.parametrize(
    "make",
    [
        mpidist.HierarchicalCopyAllReduce,
        mpidist.ReductionToOneDevice,
        lambda: mpidist.ReductionToOneDevice(accumulation_fn=sum),
    ],
)
def test_other_cross_device_ops(comm, make, make_strategy):
    strategy = make_strategy(cross_device_ops=make(), allow_shared_gpu=True)
    for count in (1, 50_000):
        everyone = [numbers(rank, count) for rank in range(comm.size)]
        got = strategy.reduce("SUM", cupy.asarray(everyone[comm.rank]))
        require_equal(got, np.sum(everyone, axis=0))


SPIN = r"""
extern "C" __global__ void fill_late(
    float* to, int count, float value, long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    for (int i = threadIdx.x; i < count; i += blockDim.x)
        to[i] = value;
}
"""


@pytest.fixture
def fill_late():
    """A function that fills an array by a kernel that takes long to begin."""
    kernel = cupy.RawKernel(SPIN, "fill_late")

    def fill(array, value):
        arguments = (
            array,
            np.int32(array.size),
            np.float32(value),
            np.int64(20_000_000),
        )  # about 10 ms
        kernel((1,), (32,), arguments)

    return fill


@pytest.fixture(params=["staging", "ipc", "mpi", "device", "nccl"])
def strategy_by(comm, request, mpi_tmp_path, monkeypatch):
    """A strategy that moves all arrays on GPUs by one transport."""
    if comm.size == 1:
        pytest.skip("one rank needs no transport")
    path = mpi_tmp_path / "transports.json"
    if comm.rank == 0:
        name = short_name(MPI.Get_library_version())
        table = {key: [(0, request.param)] for key in METHODS}
        write_table(path, Layout(name, (comm.size,), "GPU"), table, {})
    comm.Barrier()
    monkeypatch.setenv("MPIDIST_TRANSPORTS", str(path))
    try:
        strategy = mpidist.MirroredStrategy(communicator=comm, allow_shared_gpu=True)
    except mpidist.LaunchError as error:
        if "the tuning table names" not in str(error):
            raise
        pytest.skip(f"there is no {request.param} here")
    yield strategy
    strategy.experimental_finalize()


@pytest.mark.parametrize("count", [10, 100_000, 2_000_000])
@pytest.mark.parametrize("stream", ["default", "own", "changing"])
@pytest.mark.parametrize("seconds", [None, 60])
def test_what_a_late_kernel_writes_is_reduced(
    comm, strategy_by, fill_late, count, stream, seconds
):
    """Not what was there before; and what comes next waits for the result."""
    strategy, options = strategy_by, CommunicationOptions(timeout_seconds=seconds)
    streams = {
        "default": [cupy.cuda.Stream.null] * 6,
        "own": [cupy.cuda.Stream(non_blocking=True)] * 6,
        # One that comes back would wait for what it has read in a slot
        "changing": [cupy.cuda.Stream(non_blocking=True) for _ in range(6)],
    }[stream]
    sends = [cupy.full(count, -1, "f4") for _ in streams]
    cupy.cuda.Device().synchronize()
    results = []
    for step, (send, current) in enumerate(zip(sends, streams, strict=True)):
        with current:
            fill_late(send, comm.rank + step)
            total = all_reduce(strategy, "SUM", send, options)
            results.append((total + 1, current))
            send[...] = -1  # the library has read it, or will before this
    for step, (result, current) in enumerate(results):
        expected = sum(range(comm.size)) + comm.size * step + 1
        with current:
            assert (result.get(stream=current) == expected).all()


@pytest.mark.parametrize("nest_bytes", [100, 4_000_000])
def test_buckets_are_reduced_beside_a_stream(comm, strategy, fill_late, nest_bytes):
    like = [cupy.zeros(nest_bytes // 16, "f4") for _ in range(4)]
    options = CommunicationOptions(bytes_per_pack=nest_bytes // 3)
    buckets = strategy.gradient_buckets(like, "SUM", options)
    for step in range(3):
        with buckets:
            for key in range(4):
                gradient = cupy.full(like[key].shape, -1, "f4")
                fill_late(gradient, comm.rank + key + step)
                buckets.put(key, gradient)
                del gradient
        for key, total in enumerate(buckets.result):
            ranks = sum(range(comm.size)) + comm.size * (key + step)
            require_equal(total, np.full(like[key].shape, ranks, "f4"))
    buckets.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "f4", "i4"])
@pytest.mark.parametrize("compression", [None, "float16"])
def test_results_of_buckets_are_memory_of_the_stream(
    comm, strategy, dtype, compression
):
    """Not of the thread's, which would write there while others still read."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    like = [cupy.ones(5, dtype), cupy.ones((300, 70), dtype)]
    options = CommunicationOptions(compression=compression)
    buckets = strategy.gradient_buckets(like, "MEAN", options)
    with buckets:
        for key, array in enumerate(like):
            buckets.put(key, array)
    assert len({id(result.data.mem) for result in buckets.result}) == 1
    assert all((result == 1).all() for result in buckets.result)
    buckets.close()


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("axis", [0, 1, (0, 1)])
def test_narrow_numbers_are_added_up_over_an_axis(comm, strategy, op, name, axis):
    """In double precision, of which CuPy makes the narrow number at the end."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(name if name == "float16" else ml_dtypes.bfloat16)
    parts = [
        (np.arange(35).reshape(7, 5) + 3 * rank).astype(dtype)
        for rank in range(comm.size)
    ]
    exact = np.sum([part.astype("f8") for part in parts], axis=0).sum(axis)
    if op == "MEAN":
        exact = exact / (np.prod(np.array([7, 5])[np.array(axis)]) * comm.size)
    got = strategy.reduce(op, cupy.asarray(parts[comm.rank]), axis=axis)
    require_equal(got, np.asarray(exact).astype(dtype))


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated:DeprecationWarning")
def test_a_stream_that_is_gone_is_not_waited_for(comm, strategy):
    """PyTorch's streams are lent; who does so may destroy them."""
    for step in range(3):
        address = cupy.cuda.runtime.streamCreate()
        with cupy.cuda.ExternalStream(address) as stream:
            got = all_reduce(strategy, "SUM", cupy.full(3, step))
            expected = np.full(3, step * comm.size)
            np.testing.assert_array_equal(got.get(stream=stream), expected)
        cupy.cuda.runtime.streamDestroy(address)


def test_nothing_leaks(comm, strategy):
    values = {"small": cupy.ones(3), "large": [cupy.ones(20_000)] * 3}
    pool, pinned = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()

    def measure():
        gc.collect()
        return pool.used_bytes(), pinned.n_free_blocks(), DeviceBuffer.in_use_bytes

    # The first steps use each of the buffers that are used in turn
    for steps in (20, 10_000):
        for _ in range(steps):
            strategy.reduce("SUM", values["small"])
        for _ in range(steps // 10):
            strategy.reduce("MEAN", values)
        if steps == 20:
            before = measure()
    assert measure() == before


def test_the_end_of_a_strategy_frees_all(comm):
    """This rank's memory, and what it has mapped of other ranks'."""

    def measure():
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        comm.Barrier()
        free, total = cupy.cuda.runtime.memGetInfo()
        comm.Barrier()  # before others take memory
        return DeviceBuffer.in_use_bytes, total - free

    for step in range(4):
        strategy = mpidist.MirroredStrategy(communicator=comm, allow_shared_gpu=True)
        strategy.reduce("SUM", {"a": cupy.ones(300_000), "b": cupy.ones(2)})
        strategy.experimental_finalize()
        del strategy
        if step == 0:  # what is loaded once is loaded now
            before = measure()
    buffers, used = measure()
    assert buffers == before[0]
    assert used < before[1] + (16 << 20)  # the buffers of a rank take 64 MiB


def test_memory_of_cudas_own_pool(comm, strategy, options):
    """It cannot be shared between processes."""
    if not cupy.cuda.runtime.deviceGetAttribute(
        cupy.cuda.runtime.cudaDevAttrMemoryPoolsSupported, 0
    ):
        pytest.skip("this GPU has no such pools")
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        for count in COUNTS:
            mine = cupy.asarray(numbers(comm.rank, count))
            everyone = [numbers(rank, count) for rank in range(comm.size)]
            expected = np.sum(everyone, axis=0, dtype="f4")
            require_equal(all_reduce(strategy, "SUM", mine, options), expected)


def test_the_main_job_learns_on_gpus(mpirun, tmp_path):
    """As on CPUs, but for the last digits."""
    job = str(Path(__file__).parents[2] / "jobs" / "train_digits.py")
    pytest.importorskip("sklearn")
    scores = []
    for devices in ([], ["--devices", "CPU:0"]):
        arguments = ["--data-dir", str(tmp_path), *devices]
        ended = mpirun(2, job, *arguments, MPIDIST_ALLOW_SHARED_GPU="1")
        *_, last = ended.stdout.splitlines()
        parts = last.split()[:2]  # loss=... accuracy=...
        scores.append([float(part.partition("=")[2]) for part in parts])
    (loss, accuracy), (expected_loss, expected_accuracy) = scores
    assert abs(loss - expected_loss) < 1e-4
    assert abs(accuracy - expected_accuracy) < 2e-3


def test_transports_are_measured(mpirun, comm, tmp_path):
    path = comm.bcast(tmp_path / "table.json")
    script = f"""
import sys
from mpidist.__main__ import main
sys.exit(main(["tune", "--output", {str(path)!r}, "--largest-bytes", "100000",
               "--repetitions", "1"]))
"""
    mpirun(2, script, MPIDIST_ALLOW_SHARED_GPU="1")
    if comm.rank == 0:
        layout = Layout(short_name(MPI.Get_library_version()), (2,), "GPU")
        assert set(find_table(path, layout)) == {*METHODS}


def test_numbers_of_python_beside_arrays_again_and_again(comm, strategy):
    """Small ones travel together: through the host, where the numbers are."""
    for number in (2, 3.5, 4, 1 << 40):
        for _ in range(2):
            value = {"x": cupy.asarray(numbers(comm.rank, 7)), "n": number}
            found = all_reduce(strategy, "SUM", value)
            expected = sum(numbers(rank, 7) for rank in range(comm.size))
            require_equal(found["x"], expected)
            assert found["n"] == comm.size * number
