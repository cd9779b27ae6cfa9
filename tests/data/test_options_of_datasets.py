"""Options as TensorFlow's scripts set them, and optional elements."""

import copy
import pickle

import numpy as np
import pytest
from all_ranks import local

import mpidist
from mpidist import AutoShardPolicy, Dataset, Optional, Options, TensorSpec


def test_the_policy_is_set_as_in_tensorflow():
    options = Options()
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    assert options == Options(AutoShardPolicy.DATA)
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.DATA
    options.auto_shard_policy = AutoShardPolicy.OFF
    assert repr(options) == "Options(auto_shard_policy=<AutoShardPolicy.OFF: -1>)"


def test_a_datasets_options_do_not_change_with_the_object():
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    rows = Dataset.range(4).with_options(options)
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    rows.options().auto_shard_policy = AutoShardPolicy.FILE
    assert rows.options().auto_shard_policy is AutoShardPolicy.DATA
    assert rows.map(lambda x: x).options() == rows.options()


@pytest.mark.parametrize("of", [lambda o: o, lambda o: o.experimental_distribute])
def test_other_values_and_names_are_refused(of):
    options = Options()
    with pytest.raises(TypeError, match="auto_shard_policy must be an AutoShardPolicy"):
        of(options).auto_shard_policy = "DATA"
    with pytest.raises(AttributeError, match=r"threads.*auto_shard_policy"):
        of(options).threads = 3
    assert options == Options()


def test_options_are_copied_and_pickled():
    options = Options(AutoShardPolicy.DATA)
    for twin in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        assert twin == options
        twin.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    assert options == Options(AutoShardPolicy.DATA)


def test_the_policy_is_followed(strategy, comm):
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    rows = Dataset.range(comm.size).batch(comm.size).with_options(options)
    batches = list(strategy.experimental_distribute_dataset(rows))
    assert [local(strategy, b).tolist() for b in batches] == [
        [i] for i in range(comm.size)
    ]


def test_an_optional_of_a_value():
    found = Optional.from_value((np.zeros((2, 3), np.float32), 1))
    assert found.has_value()
    assert found.get_value()[1] == 1
    assert found.element_spec == (
        TensorSpec((2, 3), np.float32),
        TensorSpec((), np.int64),
    )


def test_an_empty_optional():
    spec = {"a": TensorSpec((None,), np.int64)}
    found = Optional.empty(spec)
    assert not found.has_value()
    assert found.element_spec == spec
    with pytest.raises(ValueError, match="no value"):
        found.get_value()
    with pytest.raises(TypeError, match="TensorSpec"):
        Optional.empty((3,))


@pytest.mark.parametrize("is_generator", [False, True])
def test_the_spec_of_a_datasets_optionals(strategy, comm, is_generator):
    arrays = [np.arange(2 * comm.size)]
    rows = (
        Dataset.from_generator(lambda: iter(np.arange(2 * comm.size)))
        if is_generator
        else Dataset.from_tensor_slices(arrays[0])
    )
    iterator = iter(strategy.experimental_distribute_dataset(rows.batch(2 * comm.size)))
    spec = TensorSpec((None,), np.int64)
    for has_value in (True, False):
        found = iterator.get_next_as_optional()
        assert found.has_value() is has_value
        assert found.element_spec == spec


def batches(comm, n):
    return Dataset.range(n).batch(2 * comm.size)


@pytest.mark.parametrize("n", [0, 1, 13])
def test_reduce_of_a_distributed_dataset(strategy, comm, n):
    data = strategy.experimental_distribute_dataset(batches(comm, n))

    def add(state, batch):
        assert not mpidist.in_cross_replica_context() or mpidist.has_strategy()
        steps, total = state
        return steps + 1, total + strategy.reduce("SUM", batch, axis=0)

    for _ in range(2):  # each from the start
        steps, total = data.reduce((0, 0), add)
        assert (steps, total) == (len(data), sum(range(n)))


def test_reduce_of_an_endless_dataset_is_refused(strategy, comm):
    data = strategy.experimental_distribute_dataset(batches(comm, 4).repeat())
    with pytest.raises(ValueError, match=r"take\("):
        data.reduce(0, lambda state, batch: state)


def test_what_the_function_raises_on_one_rank_is_raised_on_all(strategy, comm):
    data = strategy.experimental_distribute_dataset(batches(comm, 13))

    def fail(state, batch):
        if comm.rank == comm.size - 1 and state == 1:
            raise KeyError("mine")
        return state + 1

    with pytest.raises(KeyError, match="mine"):
        data.reduce(0, fail)
    with pytest.raises(TypeError, match="reduce_func"):
        data.reduce(0, 3 if comm.rank == 0 else fail)
    assert data.reduce(0, lambda state, batch: state + 1) == len(data)
