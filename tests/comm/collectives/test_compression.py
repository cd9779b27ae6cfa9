"""Numbers that travel as float16 or bfloat16, and sums whose every bit is known."""

import functools

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist import CommunicationOptions

UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
IMPLEMENTATIONS = ["AUTO", "MPI"]


@pytest.fixture(params=[None, "1", "2"])
def over_nodes(comm, monkeypatch, request):
    """A strategy on one node, and on pretended ones."""
    if request.param:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", request.param)
    strategy = mpidist.MirroredStrategy(communicator=comm)
    yield strategy
    strategy.experimental_finalize()


def random_numbers(rank, count, dtype="f4"):
    random = np.random.default_rng(rank)
    return (random.standard_normal(count) * 10.0 ** random.integers(-7, 3)).astype(
        dtype
    )


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("compression", UNITS)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_the_error_of_compressed_sums_is_bounded(
    comm, over_nodes, compression, implementation, dtype, op
):
    options = CommunicationOptions(
        compression=compression, implementation=implementation
    )
    for count in (1, 1000, 200_000):
        parts = [random_numbers(rank, count, dtype) for rank in range(comm.size)]
        ops = over_nodes.extended.cross_device_ops
        found = ops.reduce(op, parts[comm.rank], "CPU:0", options) + 0
        assert found.dtype == dtype
        exact = np.sum(parts, axis=0, dtype="f8")
        magnitudes = np.sum(np.abs(parts), axis=0, dtype="f8")
        # What is sent, and what comes back; below 2**-14, float16 has a fixed step
        bound = 2.01 * UNITS[compression] * magnitudes
        if compression == "float16":
            bound += (comm.size + 1) * 2.0**-25
        if op == "MEAN":
            exact, bound = exact / comm.size, bound / comm.size
        if comm.size == 1:
            bound = 0 * bound  # nothing is sent
        assert (np.abs(found - exact) <= bound + 1e-12 * magnitudes).all()
        everyone = comm.allgather(np.asarray(found).tobytes())
        assert set(everyone) == {everyone[0]}


def sends(strategy):
    """Return the implementations that send something: memory of a node is none."""
    return IMPLEMENTATIONS[strategy.extended.topology.is_one_node :]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compression", UNITS)
def test_what_is_sent_is_really_narrow(comm, over_nodes, compression):
    """Numbers between two narrow ones are rounded, by each implementation alike."""
    value = np.full(3, 1 + UNITS[compression] / 2, "f4")
    ops = over_nodes.extended.cross_device_ops
    for implementation in sends(over_nodes):
        options = CommunicationOptions(
            compression=compression, implementation=implementation
        )
        found = ops.reduce("SUM", value, "CPU:0", options) + 0
        assert found.tolist() == [comm.size] * 3


@pytest.mark.parametrize("compression", UNITS)
@pytest.mark.parametrize("count", [3, 100_000])
def test_what_is_not_sent_is_not_narrow(comm, strategy, compression, count):
    value = np.full(count, 1 + UNITS[compression] / 2, "f4")
    options = CommunicationOptions(compression=compression)
    found = strategy.extended.cross_device_ops.reduce("SUM", value, "CPU:0", options)
    assert np.array_equal(found + 0, value * np.float32(comm.size))


@pytest.mark.mpi(min_size=2)
def test_nodes_send_each_other_narrow_sums(comm, monkeypatch, make_strategy):
    """In a node numbers are added up as they are."""
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "2")
    strategy = make_strategy()
    unit = UNITS["bfloat16"]
    # Each is rounded to 1 or to 1 + 2 * unit; of two ranks, the sum is a narrow number
    value = np.full(200_000, 1 + (3 if comm.rank % 2 else 1) * unit, "f4")
    options = CommunicationOptions(compression="bfloat16")
    found = strategy.extended.cross_device_ops.reduce("SUM", value, "CPU:0", options)
    sums = np.array([2 + 4 * unit] * (comm.size // 2), "f4")
    assert np.array_equal(sums.astype(ml_dtypes.bfloat16).astype("f4"), sums)
    total = sums.sum() + (1 if comm.size % 2 else 0)  # the last node's one rank
    expected = np.float32(total)
    if comm.size > 2:
        expected = expected.astype(ml_dtypes.bfloat16).astype("f4")
    assert (found + 0 == expected).all()


@pytest.mark.mpi(min_size=2)
def test_sums_are_accumulated_in_float32(comm, over_nodes):
    """In float16, 2048 + 1 is 2048."""
    options = CommunicationOptions(compression="float16", implementation="MPI")
    value = np.array([2048.0 if comm.rank == 0 else 1.0] * 100, "f4")
    ops = over_nodes.extended.cross_device_ops
    found = ops.reduce("SUM", value, "CPU:0", options) + 0
    expected = np.float32(np.float16(2048.0 + comm.size - 1))
    assert (found == expected).all()


@pytest.mark.mpi(min_size=2)
def test_what_float16_cannot_hold_is_inf(comm, over_nodes):
    ops = over_nodes.extended.cross_device_ops
    way = sends(over_nodes)[0]
    options = CommunicationOptions(compression="float16", implementation=way)
    value = np.array([70_000.0, -70_000.0, 60_000.0, 1.0], "f4")
    found = ops.reduce("SUM", value, "CPU:0", options) + 0
    assert found.tolist() == [np.inf, -np.inf, np.inf, comm.size]
    options = CommunicationOptions(compression="bfloat16")
    found = ops.reduce("SUM", value, "CPU:0", options) + 0
    assert np.isfinite(found).all()


def test_one_device_refuses_compression(make_strategy):
    ops = mpidist.ReductionToOneDevice()
    make_strategy(cross_device_ops=ops)
    with pytest.raises(mpidist.ArgumentError, match="compression"):
        options = CommunicationOptions(compression="float16")
        ops.reduce("SUM", np.ones(3), "CPU:0", options)


@pytest.mark.parametrize("name", ["float8", "f2", "", 16])
def test_other_compressions_are_refused(name):
    with pytest.raises(mpidist.ArgumentError, match="compression must be"):
        CommunicationOptions(compression=name)


def test_reproducible_is_true_or_false():
    with pytest.raises(mpidist.ArgumentTypeError, match="reproducible must be"):
        CommunicationOptions(reproducible="yes")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_bit_is_that_of_adding_in_the_order_of_the_ranks(
    comm, over_nodes, implementation
):
    """The model of calls has other dtypes, packs and operations."""
    options = CommunicationOptions(implementation=implementation, reproducible=True)
    for count in (1, 1000, 130_000):
        parts = [random_numbers(rank, count) for rank in range(comm.size)]
        ops = over_nodes.extended.cross_device_ops
        found = ops.reduce("SUM", parts[comm.rank], "CPU:0", options) + 0
        assert found.tobytes() == functools.reduce(np.add, parts).tobytes()


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pack_sizes_change_no_bit(comm, over_nodes, op, implementation):
    values = [random_numbers(comm.rank + i, 3000, "f8") for i in range(6)]

    def total(size):
        options = CommunicationOptions(
            bytes_per_pack=size, implementation=implementation
        )
        context = mpidist.get_replica_context
        sums = over_nodes.run(lambda: context().all_reduce(op, values, options))
        return np.concatenate([part.values[0] for part in sums])

    assert len({total(size).tobytes() for size in (0, 1, 30_000, 70_000)}) == 1
