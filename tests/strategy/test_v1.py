"""Scripts in the style of TensorFlow 1; sparse values in gather."""

import numpy as np
import pytest
import scipy.sparse
from all_ranks import local

import mpidist


def test_group_waits_for_nothing_and_gives_one_value_back(strategy):
    value = strategy.run(lambda: np.ones(2))
    np.testing.assert_array_equal(strategy.group(value), [1, 1])
    assert strategy.group(3) == 3
    assert strategy.group(value, name="train") is None
    assert strategy.group([value, value]) is None
    assert strategy.group([]) is None


def test_configure_updates_the_mapping_in_place(strategy):
    config = {"own": 1}
    assert strategy.configure(session_config=config) is None
    assert config == strategy.update_config_proto({"own": 1})
    assert strategy.configure() is None
    with pytest.raises(TypeError, match="session_config"):
        strategy.configure(session_config=(1,))


@pytest.mark.parametrize(
    "options",
    [{"cluster_spec": {"worker": []}}, {"task_type": "worker"}, {"task_id": 0}],
)
def test_configure_takes_no_cluster(strategy, options):
    with pytest.raises(NotImplementedError, match="mpirun"):
        strategy.configure(**options)


def test_properties_of_the_extended(strategy):
    assert strategy.extended.experimental_between_graph is True
    assert strategy.extended.experimental_should_init is True


@pytest.mark.parametrize("of", [lambda s: s, lambda s: s.extended])
def test_numpy_datasets(strategy, of, make_strategy):
    make = of(strategy).experimental_make_numpy_dataset
    assert list(make(np.arange(3), session=None)) == [0, 1, 2]
    with strategy.scope():
        assert len(make((np.arange(4), np.ones(4)))) == 4
    with pytest.raises(RuntimeError, match="in replica context"):
        strategy.run(lambda: make(np.arange(3)))
    other = make_strategy()
    with (
        other.scope(),
        pytest.raises(RuntimeError, match=r"Mixing different tf\.distribute\.Strategy"),
    ):
        make(np.arange(3))


def slices():
    return mpidist.IndexedSlices(np.ones((2, 2)), np.array([0, 2]), (3, 2))


@pytest.mark.parametrize(
    "make",
    [
        slices,
        lambda: scipy.sparse.csr_array(np.eye(3)),
        lambda: scipy.sparse.coo_matrix(np.eye(3)),
        lambda: {"a": np.ones(2), "b": [slices()]},
    ],
)
def test_sparse_values_cannot_be_gathered(strategy, make):
    rank = strategy.extended.replica_id
    of_rank_0 = make() if rank == 0 else np.ones((3, 3))
    for value in (make(), of_rank_0, mpidist.PerReplica((make(),), (rank,))):
        with pytest.raises(NotImplementedError, match=r"gather: .*sparse"):
            strategy.gather(value, axis=0)

    def step():
        with pytest.raises(NotImplementedError, match=r"all_gather: .*sparse"):
            mpidist.get_replica_context().all_gather(make(), axis=0)
        return np.ones(1)

    ones = strategy.gather(strategy.run(step), axis=0)  # it can still communicate
    assert len(ones) == strategy.num_replicas_in_sync


@pytest.mark.parametrize("kind", [float, np.float32, np.array, lambda x: {"a": x}])
def test_an_input_function_may_return_scalars(strategy, comm, kind):
    def input_fn(context):
        numbers = iter(range(context.input_pipeline_id, 100, 10))
        return lambda: kind(next(numbers))

    iterator = strategy.make_input_fn_iterator(input_fn)
    for i in range(10):
        value = iterator.get_next()
        value = value["a"] if isinstance(value, dict) else value
        assert np.shape(local(strategy, value)) == ()
        ids = sum(range(comm.size))
        assert strategy.reduce("SUM", value) == 10 * i * comm.size + ids
    with pytest.raises(StopIteration):
        iterator.get_next()
    iterator.initialize()
    first = strategy.experimental_run(lambda x: x, iterator)
    first = first["a"] if isinstance(first, dict) else first
    assert strategy.reduce("SUM", first) == sum(range(comm.size))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [0, 2])
def test_scalars_that_end_early_on_one_replica_are_an_error_on_all(strategy, steps):
    def input_fn(context):
        count = steps + 2 * context.input_pipeline_id
        numbers = iter(range(count))
        return lambda: float(next(numbers))

    iterator = strategy.make_input_fn_iterator(input_fn)
    for _ in range(steps):
        iterator.get_next()
    with pytest.raises(mpidist.MismatchError, match="of rank 0 has ended"):
        iterator.get_next()


def test_a_training_loop_with_a_dataset_iterator(strategy):
    n = strategy.num_replicas_in_sync
    rows = np.arange(6.0 * n)
    dataset = strategy.experimental_make_numpy_dataset(rows).batch(2 * n)
    strategy.experimental_initialize()
    iterator = strategy.make_dataset_iterator(dataset)
    for _ in range(2):
        iterator.initialize()
        sums = []
        with pytest.raises(mpidist.OutOfRangeError):
            while True:
                squared = strategy.experimental_run(lambda x: x * x, iterator)
                sums.append(float(strategy.reduce("SUM", squared, axis=0)))
        assert sums == [float((b**2).sum()) for b in np.split(rows, 3)]
    strategy.experimental_finalize()
