"""Files of Hdf5Writer are read all together, each row once, or not at all."""

import shutil

import h5py
import numpy as np
import pytest
from all_ranks import on_root

import mpidist
from mpidist import AutoShardPolicy, DataError, Dataset, Hdf5Writer, Options

pytestmark = pytest.mark.mpi(min_size=2)
ATTRIBUTE = "mpidist_output"


def rows_of(value, size):
    return [value + 10.0 * rank + i for rank in range(size) for i in range(2)]


def write(strategy, path, value=0.0, **options):
    with Hdf5Writer(strategy, path, **options) as writer:
        writer.append(np.arange(2) + value + 10.0 * strategy.rank)


def shard(path, rank, size):
    return path.with_name(f"{path.stem}-{rank:05}-of-{size:05}.h5")


def read(files):
    return np.concatenate(list(Dataset.from_hdf5(files, "data").batch(100))).tolist()


def read_distributed(strategy, dataset):
    parts = list(mpidist.as_arrays(strategy.experimental_distribute_dataset(dataset)))
    return sorted(
        row for each in strategy.gather_objects(np.concatenate(parts)) for row in each
    )


def every_way(strategy, files):
    """Yield functions that read the rows of files, of which each gives all rows."""
    yield lambda: sorted(read(files))
    for policy in AutoShardPolicy.DATA, AutoShardPolicy.FILE:
        size = strategy.size
        dataset = Dataset.from_hdf5(files, "data").batch(size)
        yield lambda dataset=dataset, policy=policy: read_distributed(
            strategy, dataset.with_options(Options(policy))
        )


@pytest.fixture
def path(mpi_tmp_path, strategy):
    path = mpi_tmp_path / "rows.h5"
    write(strategy, path)
    return path


def copy(path, target, **changes):
    """Copy a file, with other things in its attribute."""
    shutil.copy(path, target)
    with h5py.File(target, "r+") as file:
        text = file.attrs[ATTRIBUTE].decode()
        for before, after in changes.items():
            assert before in text
            text = text.replace(before, after)
        file.attrs[ATTRIBUTE] = np.bytes_(text)


def test_whole_outputs_are_read(comm, strategy, path):
    write(strategy, path.with_name("more.h5"), 5.0)
    old, new = rows_of(0.0, comm.size), rows_of(5.0, comm.size)
    assert read(path) == read(str(path.with_name("ro*s.h5"))) == old
    assert read([path, path.with_name("more.h5")]) == old + new
    # A path that is there twice was meant twice
    assert read([path, path]) == old * 2
    shards = [shard(path, rank, comm.size) for rank in range(comm.size)]
    for files in str(path.with_name("rows-*-of-*.h5")), shards, shards[::-1]:
        for way in every_way(strategy, files):
            assert way() == sorted(old)
    # Of two outputs, each whole
    for way in every_way(strategy, str(path.with_name("*-of-*.h5"))):
        assert way() == sorted(old + new)


def test_a_shard_that_is_named_alone_is_read_alone(comm, strategy, path):
    mine = shard(path, comm.rank, comm.size)
    own = [10.0 * comm.rank, 10.0 * comm.rank + 1]
    assert read(mine) == read(str(mine)) == own

    def lists(context):
        # Together, the ranks read all shards
        return Dataset.from_hdf5([mine], "data").batch(2)

    for make in lists, lambda context: Dataset.from_hdf5(mine, "data").batch(2):
        batches = strategy.distribute_datasets_from_function(make)
        assert [x.tolist() for x in mpidist.as_arrays(batches)] == [own]


def missing(comm, path):
    shard(path, 0, comm.size).unlink()
    return "rows-*-of-*.h5", rf"missing: rows-00000-of-0000{comm.size}.h5; "


def renamed(comm, path):
    missing(comm, path)
    for rank in range(1, comm.size):
        shard(path, rank, comm.size).rename(path.with_name(f"part{rank}"))
    return "part*", "missing: that of rank 0; "


def with_index(comm, path):
    return "*.h5", r"rows-00000-of-.*: has rows that .*rows\.h5 has, too"


def copied_index(comm, path):
    copy(path, path.with_name("rows2.h5"))
    return "row*[s2].h5", "has, too"


def copied_shard(comm, path):
    copy(shard(path, 1, comm.size), path.with_name("rows-copy-of-1.h5"))
    return "rows-*-of-*.h5", "has, too"


def of_other_ranks(comm, path):
    """A whole write of more ranks, as one that was killed while it replaced files."""
    with h5py.File(shard(path, 0, comm.size)) as file:
        id = file.attrs[ATTRIBUTE].decode().split('"output": "')[1][:32]
    for rank in range(comm.size):
        copy(
            shard(path, rank, comm.size),
            shard(path, rank, 9),
            **{id: "7" * 32, f'"ranks": {comm.size}': '"ranks": 9'},
        )
    return "rows-*-of-*.h5", r"is of another write of rows\.h5 than"


@pytest.mark.parametrize(
    "change", [missing, renamed, with_index, copied_index, copied_shard, of_other_ranks]
)
def test_what_does_not_belong_together_is_an_error(comm, strategy, path, change):
    pattern, message = comm.bcast(change(comm, path) if comm.rank == 0 else None)
    files = sorted(path.parent.glob(pattern))
    for several in str(path.with_name(pattern)), files:
        # AutoShardPolicy.FILE needs a file for each rank
        for way in list(every_way(strategy, several))[: 2 + (len(files) >= comm.size)]:
            with pytest.raises(DataError, match=message):
                way()


def test_an_index_with_a_shard_of_another_write_is_an_error(comm, strategy, path):
    write(strategy, path.with_name("more.h5"), 5.0)
    mine = shard(path, 1, comm.size)
    other = shard(path.with_name("more.h5"), 1, comm.size)
    on_root(comm, other.replace, mine)
    for way in list(every_way(strategy, str(path)))[:2]:
        with pytest.raises(DataError, match=f"{mine.name} is not what was written"):
            way()


def test_an_index_with_shards_that_changed_places_is_an_error(comm, strategy, path):
    first, second = (shard(path, rank, comm.size) for rank in range(2))

    def swap():
        first.rename(path.with_name("away"))
        second.rename(first)
        path.with_name("away").rename(second)

    on_root(comm, swap)
    message = f"{first.name} has the rows of rank 1, not of rank 0"
    for way in list(every_way(strategy, str(path)))[:2]:
        with pytest.raises(DataError, match=message):
            way()


def test_an_own_dataset_in_the_index_may_have_the_shards_in_any_order(
    comm, strategy, path
):
    def add():
        layout = h5py.VirtualLayout((2,), "f8")
        layout[:] = h5py.VirtualSource(shard(path, 1, comm.size).name, "data", (2,))
        with h5py.File(path, "r+") as file:
            file.create_virtual_dataset("own", layout)

    on_root(comm, add)
    batches = Dataset.from_hdf5(path, "own").batch(2)
    assert [batch.tolist() for batch in batches] == [[10.0, 11.0]]


def test_files_of_other_programs_are_read_as_before(comm, strategy, path):
    def forget():
        for file in path.parent.iterdir():
            with h5py.File(file, "r+") as opened:
                del opened.attrs[ATTRIBUTE]
        shard(path, 0, comm.size).unlink()

    on_root(comm, forget)
    assert read(str(path.with_name("rows-*-of-*.h5"))) == rows_of(0, comm.size)[2:]


@pytest.mark.parametrize("value", [b"7", b"{}", b"[1", 3, h5py.Empty("S1"), "text"])
def test_another_attribute_of_that_name_is_none(comm, tmp_path, value):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = [1.0]
        file.attrs[ATTRIBUTE] = value
    assert read(str(tmp_path / "*.h5")) == [1.0]
