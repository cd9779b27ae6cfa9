"""Who reads what: slices of batches, whole files, or everything."""

import h5py
import numpy as np
import pytest
from all_ranks import local_rows, on_root, require_usable
from datasets import generated, in_batches, joined, numbers, with_policy

import mpidist
from mpidist import AutoShardPolicy, Dataset, Options


@pytest.fixture
def files(comm, mpi_tmp_path):
    """A function that writes files of so many rows each; rows are numbered."""

    def write(*counts):
        if comm.rank == 0:
            parts = np.split(np.arange(sum(counts)), np.cumsum(counts)[:-1])
            for i, part in enumerate(parts):
                with h5py.File(mpi_tmp_path / f"{i}.h5", "w") as file:
                    file["x"] = part
        comm.Barrier()
        return [mpi_tmp_path / f"{i}.h5" for i in range(len(counts))]

    return write


def rows_of(counts, number):
    start = sum(counts[:number])
    return list(range(start, start + counts[number]))


def test_the_policies_are_tensorflows():
    assert [(p.name, p.value) for p in AutoShardPolicy] == [
        ("OFF", -1),
        ("AUTO", 0),
        ("FILE", 1),
        ("DATA", 2),
    ]
    assert Options().auto_shard_policy is AutoShardPolicy.AUTO
    with pytest.raises(TypeError, match="auto_shard_policy"):
        Options(auto_shard_policy="DATA")
    with pytest.raises(TypeError, match="options"):
        numbers(3).with_options(AutoShardPolicy.OFF)


def test_steps_keep_the_options():
    options = Options(auto_shard_policy=AutoShardPolicy.OFF)
    dataset = numbers(8).with_options(options).map(abs).shuffle(8).repeat(2).shard(2, 0)
    dataset = dataset.skip(1).take(4).batch(2).prefetch(1).concatenate([np.arange(3)])
    assert dataset.options() == options
    assert numbers(8).options() == Options()


@pytest.mark.parametrize("policy", ["AUTO", "DATA"])
@pytest.mark.parametrize("make", [numbers, generated])
def test_auto_and_data_divide_batches(strategy, comm, make, policy):
    dataset = with_policy(make(14).batch(8), policy)
    found = local_rows(strategy, strategy.experimental_distribute_dataset(dataset))
    plain = local_rows(
        strategy, strategy.experimental_distribute_dataset(make(14).batch(8))
    )
    assert found == plain
    everyone = comm.allgather(found)
    assert [joined(parts) for parts in zip(*everyone)] == in_batches(list(range(14)), 8)


def test_file_may_be_endless(strategy, comm, files):
    dataset = Dataset.from_hdf5(files(3, 3, 3, 3), "x").repeat().batch(2 * comm.size)
    divided = strategy.experimental_distribute_dataset(with_policy(dataset, "FILE"))
    assert divided.cardinality == -1
    iterator = iter(divided)
    rows = joined(rows_of((3, 3, 3, 3), i) for i in range(comm.rank, 4, comm.size))
    assert local_rows(strategy, [next(iterator)]) == [rows[:2]]
    iterator.close()


def test_file_opens_no_file_of_another_replica(strategy, comm, files):
    paths = files(2, 2, 2, 2, 2)
    for i, path in enumerate(paths):
        if i % comm.size != comm.rank:
            paths[i] = path.parent / "not there" / path.name
    dataset = Dataset.from_hdf5(paths, "x").batch(4)
    divided = strategy.experimental_distribute_dataset(with_policy(dataset, "FILE"))
    found = joined(local_rows(strategy, divided))
    assert found == joined(rows_of((2,) * 5, i) for i in range(comm.rank, 5, comm.size))


def test_file_takes_concatenated_files(strategy, comm, files):
    paths = files(2, 2, 2, 2, 2, 2, 2, 2)
    one, two = (Dataset.from_hdf5(half, "x") for half in (paths[:4], paths[4:]))
    dataset = with_policy(one.concatenate(two).batch(comm.size), "FILE")
    found = joined(
        local_rows(strategy, strategy.experimental_distribute_dataset(dataset))
    )
    own = [i for half in (0, 4) for i in range(half + comm.rank, half + 4, comm.size)]
    assert found == joined(rows_of((2,) * 8, i) for i in own)


def test_file_needs_files(strategy):
    for dataset in (numbers(8), generated(8), numbers(8).concatenate(numbers(2))):
        with pytest.raises(ValueError, match=r"dataset of files.*DATA"):
            strategy.experimental_distribute_dataset(
                with_policy(dataset.batch(4), "FILE")
            )
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_file_needs_as_many_files_as_workers(strategy, comm, files):
    dataset = Dataset.from_hdf5(files(*[4] * (comm.size - 1)), "x").batch(4)
    expected = rf"{comm.size - 1} files for {comm.size} workers; use.*DATA"
    with pytest.raises(ValueError, match=expected):
        strategy.experimental_distribute_dataset(with_policy(dataset, "FILE"))
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_a_missing_file_of_one_replica_is_an_error_on_all(strategy, comm, files):
    paths = files(*[4] * comm.size)
    on_root(comm, paths[1].unlink)
    dataset = with_policy(Dataset.from_hdf5(paths, "x").batch(4), "FILE")
    with pytest.raises(mpidist.DataError, match=r"1\.h5"):
        strategy.experimental_distribute_dataset(dataset)
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
def test_files_of_unlike_rows_are_an_error_on_all(strategy, comm, files, mpi_tmp_path):
    paths = files(*[4] * comm.size)
    if comm.rank == 0:
        with h5py.File(paths[1], "w") as file:
            file["x"] = np.zeros((4, 2), "f4")
    comm.Barrier()
    dataset = with_policy(Dataset.from_hdf5(paths, "x").batch(4), "FILE")
    with pytest.raises(mpidist.MismatchError, match="float32 2 dimensions on rank 1"):
        strategy.experimental_distribute_dataset(dataset)
    require_usable(strategy)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "build",
    [
        lambda paths, odd: with_policy(paths.batch(4), "OFF" if odd else "AUTO"),
        lambda paths, odd: with_policy(paths.batch(4), "FILE" if odd else "AUTO"),
        lambda paths, odd: with_policy(paths.batch(4 + 4 * odd), "FILE"),
        lambda paths, odd: with_policy(paths.shuffle(seed=int(odd)).batch(4), "FILE"),
        lambda paths, odd: with_policy(paths.take(4 + odd).batch(4), "OFF"),
    ],
)
def test_unlike_policies_and_datasets_are_refused_on_all(strategy, comm, files, build):
    rows = Dataset.from_hdf5(files(*[4] * comm.size), "x")
    with pytest.raises(mpidist.MismatchError):
        strategy.experimental_distribute_dataset(build(rows, comm.rank == 1))
    require_usable(strategy)


def test_other_replication_modes_are_refused():
    with pytest.raises(ValueError, match="experimental_replication_mode"):
        mpidist.InputOptions(
            experimental_replication_mode=mpidist.InputReplicationMode.PER_REPLICA
        )


def test_batches_may_stay_on_the_host(strategy):
    options = mpidist.InputOptions(experimental_fetch_to_device=False)
    for source in (numbers(8).batch(4), [np.arange(4)]):
        for batch in strategy.experimental_distribute_dataset(source, options):
            (part,) = strategy.experimental_local_results(batch)
            assert type(part) is np.ndarray
