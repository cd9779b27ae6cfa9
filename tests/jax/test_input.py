"""Batches as JAX arrays: every row once, and none changes later."""

import h5py
import numpy as np
import pytest

import mpidist
from mpidist.checkpoint.state import strategy_of
from mpidist.errors import ArgumentTypeError, DTypeError

jax = pytest.importorskip("jax")
mj = pytest.importorskip("mpidist.jax")
jnp = jax.numpy

ROWS = 64


@pytest.fixture
def path(comm, mpi_tmp_path):
    path = mpi_tmp_path / "rows.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(ROWS * 4096, dtype="f4").reshape(ROWS, 4096)
            file["y"] = np.arange(ROWS, dtype="i8")
    comm.barrier()
    return path


def distribute(strategy, path, shuffle=True):
    rows = mpidist.Dataset.from_hdf5(path, ["x", "y"])
    rows = rows.shuffle(seed=1) if shuffle else rows
    return mj.as_jax(strategy.experimental_distribute_dataset(rows.batch(12)))


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_are_jax_arrays_that_stay_as_they_are(comm, strategy, path, shuffle):
    data = distribute(strategy, path, shuffle)
    kept = [batch for _ in range(3) for batch in data]  # all are alive at once
    assert len(kept) == 3 * len(data)
    for x, y in kept:
        assert isinstance(x, jax.Array)
        assert isinstance(y, jax.Array)
        assert (x.dtype, y.dtype) == (jnp.float32, jnp.int32)
        first = np.asarray(x)[:, 0]
        np.testing.assert_array_equal(first, 4096.0 * np.asarray(y))
    own = np.concatenate([np.asarray(y) for _, y in kept])
    every = np.concatenate(comm.allgather(own))
    np.testing.assert_array_equal(np.sort(every), np.repeat(np.arange(ROWS), 3))


def test_large_batches_are_not_copied(strategy, path):
    inner = distribute(strategy, path)._dataset
    x = next(iter(inner))
    x, _ = strategy.experimental_local_results(x)[0]
    assert x.ctypes.data % 64 == 0
    taken = mj.runtime._to_jax(x)
    assert taken.unsafe_buffer_pointer() == x.ctypes.data


def test_arrays_of_the_program_are_not_aliased(strategy):
    source = np.ones((8, 1024), "f4")
    data = mpidist.Dataset.from_tensor_slices(source).batch(8)
    batches = mj.as_jax(strategy.experimental_distribute_dataset(data))
    kept = list(batches)
    source[...] = 2
    assert all(float(batch.max()) == 1 for batch in kept if batch.size)
    frozen = np.ones(4096, "f4")
    view = frozen[:]
    view.flags.writeable = False
    taken = mj.runtime._to_jax(view)
    frozen[...] = 2
    assert float(taken.max()) == 1


def test_state_goes_on_in_the_middle(strategy, path):
    iterator = iter(distribute(strategy, path))
    next(iterator)
    state = iterator.get_state()
    rest = [np.asarray(y) for _, y in iterator]
    again = iter(distribute(strategy, path))
    again.set_state(state)
    for got, expected in zip([np.asarray(y) for _, y in again], rest, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_datasets_and_iterators_say_what_they_are(strategy, path):
    data = distribute(strategy, path)
    assert repr(data) == f"<JaxDataset: of {data._dataset!r}>"
    assert data.cardinality == len(data) == 6
    iterator = iter(data)
    next(iterator)
    assert repr(iterator).startswith("<JaxIterator: of <DistributedIterator: step 1 of")
    iterator.close()
    assert next(iterator, None) is None


def test_a_checkpoint_takes_the_strategy_of_an_iterator(strategy, path):
    iterator = iter(distribute(strategy, path))
    assert strategy_of({"batches": iterator}) is strategy


def test_numbers_that_jax_has_not_are_refused(strategy, enable_x64):
    large = mpidist.Dataset.from_tensor_slices(np.full(8, 2**40)).batch(8)
    distributed = strategy.experimental_distribute_dataset(large)
    with enable_x64(True):
        for batch in mj.as_jax(distributed):
            assert batch.dtype == np.int64
            assert not batch.size or int(batch[0]) == 2**40
    for batch in distributed:
        (local,) = strategy.experimental_local_results(batch)
        if local.size:
            with pytest.raises(DTypeError, match="does not fit int32"):
                mj.runtime._to_jax(local)
    with pytest.raises(ArgumentTypeError, match="as_jax"):
        mj.as_jax(3)


def test_a_dataset_that_is_not_distributed_is_for_one_process(comm):
    rows = mpidist.Dataset.range(4).batch(2)
    if comm.size == 1:
        assert len(list(mpidist.jax.as_jax(rows))) == 2
    else:
        with pytest.raises(mpidist.ArgumentTypeError, match="each replica would read"):
            mpidist.jax.as_jax(rows)
