"""CrossDeviceOps and its subclasses; NumPy is the oracle."""

import warnings

import numpy as np
import pytest

import mpidist
from mpidist.comm.cross_device_ops import MpiAllReduce
from mpidist.comm.shared_memory import node

KINDS = {
    "base": mpidist.CrossDeviceOps,
    "mpi": MpiAllReduce,
    "hierarchical": mpidist.HierarchicalCopyAllReduce,
    "hierarchical, 2 packs": lambda: mpidist.HierarchicalCopyAllReduce(num_packs=2),
    "hierarchical, unpacked": lambda: mpidist.HierarchicalCopyAllReduce(num_packs=0),
    "to one": mpidist.ReductionToOneDevice,
    "to the last": None,
    "own accumulation": lambda: mpidist.ReductionToOneDevice(accumulation_fn=sum),
}


@pytest.fixture(params=KINDS)
def strategy(request, comm):
    make = KINDS[request.param]
    ops = make() if make else mpidist.ReductionToOneDevice(comm.size - 1)
    strategy = mpidist.MirroredStrategy(cross_device_ops=ops, communicator=comm)
    yield strategy
    strategy.experimental_finalize()


def contributions(strategy):
    ranks = range(strategy.num_replicas_in_sync)
    return [np.random.default_rng(r).integers(0, 99, (2, 3)) * 1.0 for r in ranks]


def mine(strategy, values):
    return values[strategy.extended.replica_id]


def test_public_reduce_and_batch_reduce_give_mirrored_values(strategy):
    ops = strategy.extended.cross_device_ops
    rank = strategy.extended.replica_id
    values = contributions(strategy)
    value = mpidist.PerReplica((mine(strategy, values),), (rank,))
    one = ops.reduce("SUM", value, destinations="CPU:0")
    two = ops.batch_reduce("MEAN", [(value, value), (values[0], ["CPU:0", "CPU:1"])])
    assert all(isinstance(v, mpidist.Mirrored) for v in (one, *two))
    np.testing.assert_array_equal(one, np.sum(values, axis=0))
    np.testing.assert_allclose(two[0], np.mean(values, axis=0), rtol=1e-15)
    np.testing.assert_allclose(two[1], values[0], rtol=1e-15)
    assert ops.batch_reduce("SUM", []) == []


def test_broadcast_gives_replica_0s_value(strategy):
    values = contributions(strategy)
    ops = strategy.extended.cross_device_ops
    got = ops.broadcast(mine(strategy, values), "CPU:0")
    np.testing.assert_array_equal(got, values[0])


@pytest.mark.parametrize("destinations", [[], "", None, 7, [7], ["CPU:0", 7]])
def test_bad_destinations_are_refused_on_all(strategy, destinations):
    ops = strategy.extended.cross_device_ops
    is_last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1
    given = destinations if is_last else "CPU:0"
    with pytest.raises(ValueError, match="destinations must be"):
        ops.reduce("SUM", 1.0, given)
    with pytest.raises(ValueError, match="destinations must be"):
        ops.broadcast(1.0, given)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


@pytest.mark.parametrize("pairs", [[1.0], [(1.0,)], [[1.0, "CPU:0"]], 5, "ab"])
def test_what_is_no_list_of_pairs_is_refused_on_all(strategy, pairs):
    with pytest.raises(ValueError, match="value_destination_pairs"):
        strategy.extended.cross_device_ops.batch_reduce("SUM", pairs)
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


class Recording(mpidist.CrossDeviceOps):
    """A user's own: adds up what it gathers, and writes down what it was asked."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(
        self, reduce_op, per_replica_value, destinations, options
    ):
        self.calls.append((reduce_op, type(per_replica_value), len(destinations)))
        (value,) = per_replica_value.values
        total = np.sum(self.collectives.consensus.comm.allgather(value), axis=0)
        is_mean = reduce_op is mpidist.ReduceOp.MEAN
        return total / self.collectives.size if is_mean else total


def test_a_users_own_subclass_is_used(make_strategy):
    ops = Recording()
    strategy = make_strategy(cross_device_ops=ops)
    n = strategy.num_replicas_in_sync
    assert strategy.reduce("MEAN", strategy.extended.replica_id) == (n - 1) / 2
    assert ops.calls == [(mpidist.ReduceOp.MEAN, mpidist.PerReplica, n)]
    value = strategy.extended.batch_reduce_to("SUM", [(1.0, "CPU:0"), (2.0, "CPU:0")])
    assert [float(v) for v in value] == [n, 2 * n]
    assert len(ops.calls) == 3
    assert strategy.reduce("SUM", np.ones(4), axis=0) == 4 * n


class Failing(mpidist.CrossDeviceOps):
    def reduce_implementation(self, reduce_op, value, destinations, options):
        if self.collectives.consensus.rank == 0:
            raise KeyError("of the user's own")
        return super().reduce_implementation(reduce_op, value, destinations, options)


def test_an_error_in_a_users_own_on_one_rank_is_raised_on_all(make_strategy):
    strategy = make_strategy(cross_device_ops=Failing())
    for axis in (None, 0):
        with pytest.raises(KeyError, match="of the user's own"):
            strategy.reduce("SUM", np.ones(2), axis=axis)
    assert strategy.gather(np.ones(1), 0).sum() == strategy.num_replicas_in_sync


def test_an_accumulation_that_fails_is_raised_on_all(make_strategy):
    ops = mpidist.ReductionToOneDevice(accumulation_fn=lambda values: values[0][:1])
    strategy = make_strategy(cross_device_ops=ops)
    with pytest.raises(ValueError, match="accumulation_fn returned shape"):
        strategy.reduce("SUM", np.ones(3))
    assert strategy.reduce("SUM", np.ones(1)) == [1]  # the first replica's


@pytest.mark.parametrize(
    "cls", [mpidist.HierarchicalCopyAllReduce, mpidist.NcclAllReduce]
)
def test_negative_packs_are_refused(cls):
    with pytest.raises(ValueError, match="num_packs"):
        cls(num_packs=-1)


def test_nccl_without_gpus_is_an_error_by_name(comm):
    with pytest.raises(mpidist.LaunchError, match="NcclAllReduce"):
        mpidist.MirroredStrategy(
            cross_device_ops=mpidist.NcclAllReduce(), communicator=comm
        )


@pytest.mark.parametrize("device", ["GPU:9", -1, 99])
def test_a_device_that_no_replica_has_is_refused(comm, device):
    with pytest.raises(ValueError, match="reduce_to_device"):
        mpidist.MirroredStrategy(
            cross_device_ops=mpidist.ReductionToOneDevice(device), communicator=comm
        )


def test_what_is_no_cross_device_ops_is_refused(comm):
    with pytest.raises(TypeError, match="cross_device_ops"):
        mpidist.MirroredStrategy(cross_device_ops="nccl", communicator=comm)


@pytest.mark.mpi(min_size=2)
def test_bad_cross_device_ops_on_one_rank_are_refused_on_all(comm):
    in_use = len(mpidist.comm.consensus.consensus.Consensus.in_use)
    for bad in ("nccl", mpidist.ReductionToOneDevice(comm.size - 1)):
        given = bad if comm.rank else mpidist.ReductionToOneDevice(0)
        with pytest.raises((TypeError, ValueError), match="cross_device_ops"):
            mpidist.MirroredStrategy(cross_device_ops=given, communicator=comm)
    assert len(mpidist.comm.consensus.consensus.Consensus.in_use) == in_use


def test_one_object_belongs_to_one_strategy(comm):
    ops = MpiAllReduce()
    with pytest.raises(RuntimeError, match="give this MpiAllReduce to a strategy"):
        ops.reduce("SUM", 1.0, "CPU:0")
    strategy = mpidist.MirroredStrategy(cross_device_ops=ops, communicator=comm)
    with pytest.raises(RuntimeError, match="another strategy"):
        mpidist.MirroredStrategy(cross_device_ops=ops, communicator=comm)
    strategy.experimental_finalize()


@pytest.mark.mpi(min_size=2)
def test_unlike_cross_device_ops_are_refused_on_all(comm):
    ops = mpidist.HierarchicalCopyAllReduce() if comm.rank else None
    with pytest.raises(ValueError, match="cross_device_ops is"):
        mpidist.MirroredStrategy(cross_device_ops=ops, communicator=comm)


@pytest.mark.mpi(min_size=2)
def test_hierarchical_without_shared_memory_is_refused(comm, monkeypatch):
    monkeypatch.setattr(node, "free_bytes", lambda is_shared: {"/dev/shm": 10})
    ops = mpidist.HierarchicalCopyAllReduce()
    with (
        warnings.catch_warnings(),
        pytest.raises(mpidist.LaunchError, match="shared memory"),
    ):
        warnings.simplefilter("ignore")
        mpidist.MirroredStrategy(cross_device_ops=ops, communicator=comm)


DEVICES = ["CPU:0", "cpu:0", "/CPU:0", "/device:CPU:0", "/job:w/task:0/device:CPU:0"]


@pytest.mark.parametrize("device", DEVICES)
def test_devices_are_named_as_in_tensorflow(comm, device, make_strategy):
    ops = mpidist.ReductionToOneDevice(device)
    strategy = make_strategy([device], ops)
    assert strategy.extended.worker_devices == ("CPU:0",)
    value, size = np.ones(2), comm.size
    for destinations in (device, [device]):
        total = strategy.extended.reduce_to("SUM", value, destinations)
        np.testing.assert_array_equal(total, [size, size])
        pairs = [(value, destinations)]
        (total,) = strategy.extended.batch_reduce_to("SUM", pairs)
        np.testing.assert_array_equal(total, [size, size])
        first = strategy.extended.broadcast_to(comm.rank + 5, destinations)
        assert int(first) == 5


class Clipped(mpidist.CrossDeviceOps):
    def reduce_implementation(self, *args):
        return np.minimum(super().reduce_implementation(*args), 1.5)


@pytest.mark.parametrize("rows", [20, 30_000])
def test_numbers_of_rows_are_not_for_users_to_reduce(comm, make_strategy, rows):
    strategy = make_strategy(cross_device_ops=Clipped())
    values = np.full((rows + comm.rank, 2), 0.5 / rows / comm.size)
    total = sum(rows + rank for rank in range(comm.size))
    np.testing.assert_allclose(
        strategy.reduce("MEAN", values, axis=0), values.sum(0) * 0 + values[0]
    )
    found = strategy.statistics_of(np.arange(6.0) + 10 * comm.rank)
    everyone = [np.arange(6.0) + 10 * rank for rank in range(comm.size)]
    assert found.mean == np.mean(everyone)
    histogram = mpidist.statistics.Histogram([-1, 1e9], strategy=strategy)
    histogram.update_state(np.zeros(rows + comm.rank))
    assert list(histogram.result().counts) == [total]
