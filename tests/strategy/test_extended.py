"""StrategyExtended, copies of strategies, and TensorFlow 1's small methods."""

import copy

import numpy as np
import pytest

import mpidist


def per_replica(strategy, value):
    return mpidist.PerReplica((value,), (strategy.extended.replica_id,))


def test_read_var(strategy):
    with strategy.scope():
        w = mpidist.Variable(3.0)
        assert strategy.extended.read_var(w) == 3.0
    assert strategy.extended.read_var(mpidist.Mirrored((4,))) == 4


def test_update_of_a_mirrored_value_and_results(strategy):
    update = strategy.extended.update
    value = mpidist.Mirrored((np.ones(2),))
    got = update(
        value, lambda v, d: v + d, args=(per_replica(strategy, 2.0),), group=False
    )
    np.testing.assert_array_equal(got, [3, 3])


def test_update_gives_the_function_a_dict_of_its_own(strategy):
    with strategy.scope():
        w, v = (mpidist.Variable(np.zeros(2)) for _ in range(2))
    sums = {"b": np.ones(2), "a": 3.0}

    def fn(variables, sums):
        assert type(variables) is list
        assert list(sums) == ["b", "a"]
        for variable in variables:
            variable.assign_add(sums["b"])
        del sums["b"]
        return variables

    assert strategy.extended.update([w, v], fn, (sums,), group=False) == [w, v]
    assert list(sums) == ["b", "a"]
    np.testing.assert_array_equal([w, v], np.ones((2, 2)))


def test_update_non_slot(strategy):
    extended = strategy.extended
    devices = extended.non_slot_devices([])
    assert devices == extended.parameter_devices == extended.worker_devices
    seen = []

    def fn(a, *, b):
        assert mpidist.in_cross_replica_context()
        seen.append(a + b)
        return a

    value = per_replica(strategy, 2)
    assert extended.update_non_slot(devices, fn, (value,), {"b": 1}) is None
    assert extended.update_non_slot(devices, fn, (value,), {"b": 1}, group=False) == 2
    assert seen == [3, 3]


def test_variables_and_where_they_lie(strategy, comm):
    extended = strategy.extended
    foreign = mpidist.Variable(1.0)
    with strategy.scope():
        w = mpidist.Variable(1.0)
        with extended.colocate_vars_with(w):
            v = mpidist.Variable(2.0)
        with pytest.raises(ValueError, match="colocate_vars_with"):
            extended.colocate_vars_with(foreign)
    assert extended.variable_created_in_scope(v)
    assert not extended.variable_created_in_scope(foreign)
    assert extended.value_container(w) is w


def test_who_writes(strategy):
    is_first = strategy.extended.replica_id == 0
    assert strategy.extended.should_checkpoint is is_first
    assert strategy.extended.should_save_summary is is_first
    assert strategy.extended.experimental_require_static_shapes is False
    assert strategy.cluster_resolver is None


def test_call_for_each_replica_is_run(strategy):
    fn = strategy.extended.call_for_each_replica
    value = per_replica(strategy, strategy.extended.replica_id)
    got = fn(lambda x, y: x + y, args=(value,), kwargs={"y": 1})
    (local,) = strategy.experimental_local_results(got)
    assert local == strategy.extended.replica_id + 1


def test_run_steps_on_iterator(strategy):
    rows = mpidist.Dataset.from_tensor_slices(np.arange(12.0)).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(rows))

    def step(context, batch):
        assert mpidist.in_cross_replica_context()
        context.set_last_step_output("sum", strategy.reduce("SUM", batch, axis=0))
        context.set_last_step_output("ones", strategy.run(lambda: 1), "SUM")
        context.set_non_tensor_output("what", "text")

    context = strategy.extended.experimental_run_steps_on_iterator(step, iterator, 2)
    assert context.last_step_outputs["sum"] == 4 + 5 + 6 + 7
    assert context.last_step_outputs["ones"] == strategy.num_replicas_in_sync
    assert context.non_tensor_outputs == {"what": "text"}


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.reduce_to("SUM", 1.0, "CPU:0"),
        lambda e: e.batch_reduce_to("SUM", []),
        lambda e: e.broadcast_to(1.0, "CPU:0"),
        lambda e: e.update_non_slot((), lambda: None),
        lambda e: e.experimental_run_steps_on_iterator(None, None),
    ],
)
def test_cross_replica_calls_are_refused_in_replica_context(strategy, call):
    with pytest.raises(RuntimeError, match="in replica context"):
        strategy.run(lambda: call(strategy.extended))


def test_a_deep_copy_shares_nothing_but_the_devices(comm):
    devices = ["CPU:0"]
    ops = mpidist.HierarchicalCopyAllReduce()
    strategy = mpidist.MirroredStrategy(devices, ops, communicator=comm)
    twin = copy.deepcopy(strategy)
    assert type(twin) is mpidist.MirroredStrategy
    assert twin.extended is not strategy.extended
    assert twin.extended.strategy is twin
    assert twin.extended.device == strategy.extended.device
    assert type(twin.extended.cross_device_ops) is type(ops)
    strategy.experimental_finalize()
    assert twin.reduce("SUM", 1) == comm.size  # on a communicator of its own
    twin.experimental_finalize()


def test_initialize_and_finalize_return_lists(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    assert strategy.experimental_initialize() == []
    assert strategy.experimental_finalize() == []
    with pytest.raises(RuntimeError, match="finalized"):
        strategy.experimental_initialize()


def test_finalize_on_one_rank_alone_raises_on_all(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    strategy.gradient_buckets([np.zeros(3)], "SUM")  # would be freed, too
    if comm.size > 1:
        with pytest.raises(mpidist.DivergenceError, match="experimental_finalize at"):
            if comm.rank:
                strategy.reduce("SUM", 1)
            else:
                strategy.experimental_finalize()
    assert strategy.reduce("SUM", 1) == comm.size
    assert strategy.experimental_finalize() == []


def test_update_config_proto_returns_a_deep_copy(strategy):
    config = {"own": [1, 2]}
    updated = strategy.update_config_proto(config)
    updated["own"].append(3)
    assert config == {"own": [1, 2]}
    assert updated["num_replicas"] == strategy.num_replicas_in_sync
    assert updated["replica_id"] == strategy.extended.replica_id
    topology = strategy.extended.topology
    has_board = topology.is_one_node and topology.size > 1
    assert updated["device"] == "CPU:0"
    assert ("shared" if has_board else "mpi") in updated["transport"].split(", ")
    with pytest.raises(TypeError, match="mapping"):
        strategy.update_config_proto([1])


def test_experimental_run_without_an_iterator(strategy):
    (local,) = strategy.experimental_local_results(strategy.experimental_run(lambda: 3))
    assert local == 3
