"""Who else holds a HDF5 file, and whose the rows are: writers, threads, forks."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import h5py
import numpy as np
import pytest
from hdf5_files import Recipe, require_rows, require_same, rows_of
from hdf5_kinds import (
    INTEGERS,
    ROWS,
)

import mpidist
from mpidist import Dataset
from mpidist.hdf5.read import Hdf5Rows

STILL_WRITTEN = {
    "contiguous": Recipe(),
    "compact": Recipe("compact"),
    "chunks": Recipe((4, 2, 2)),
    "gzip": Recipe((4, 2, 2), ("shuffle", "gzip")),
    "not filled yet": Recipe((4, 2, 2), fill=7, written=()),
    "no space yet": Recipe(fill=7, written=()),
}


@pytest.mark.parametrize("locking", [None, False])
@pytest.mark.parametrize("layout", STILL_WRITTEN)
def test_a_file_that_this_process_still_writes(tmp_path, locking, layout):
    """What h5py shows then may be in memory only."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", locking=locking) as file:
        dataset = STILL_WRITTEN[layout].write(file, INTEGERS)
        file.flush()
        for i in [5, 6, 11]:
            dataset[i] = -i
        require_rows(Dataset.from_hdf5(path, "x"), dataset[...])
        reader = Dataset.from_hdf5(path, "x")
        for i in [3, 9, 22]:
            rows_of(reader, range(ROWS))
            dataset[i, 1] = -i
            try:
                found = rows_of(reader, range(ROWS))
            except mpidist.DataError:
                break
            require_same(found, dataset[...])


@pytest.fixture
def three_layouts(tmp_path):
    """A file with the same rows three times."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        Recipe().write(file, INTEGERS, "contiguous")
        Recipe((4, 3, 2)).write(file, INTEGERS, "chunks")
        Recipe((4, 2, 2), ("shuffle", "gzip")).write(file, INTEGERS, "gzip")
    return Dataset.from_hdf5(tmp_path / "a.h5", ["contiguous", "chunks", "gzip"])


@pytest.mark.parametrize("rows", [range(ROWS), range(4, 8), [5], [9, 2, 2], []])
def test_what_was_read_belongs_to_the_caller(tmp_path, three_layouts, rows):
    expected = INTEGERS[list(rows)]
    before, others = rows_of(three_layouts, rows), rows_of(three_layouts, rows)
    for found in before:
        assert found.flags.c_contiguous
        assert found.flags.aligned
        assert found.flags.writeable
        found[...] = -1
    for found in [*others, *rows_of(three_layouts, rows)]:
        require_same(found, expected)
    os.truncate(tmp_path / "a.h5", 0)
    for found in others:
        require_same(found, expected)


def test_single_elements_and_batches_belong_to_the_caller(three_layouts):
    for dataset in [three_layouts, three_layouts.batch(1), three_layouts.batch(4)]:
        for found in next(iter(dataset)):
            found[...] = -1
        for found in next(iter(dataset)):
            assert found.ravel()[:6].tolist() == INTEGERS[0].ravel().tolist()


def test_copies_read_for_themselves(tmp_path, three_layouts):
    for _ in range(2):
        copy = pickle.loads(pickle.dumps(three_layouts))
        for found in [*rows_of(copy, [22, 3]), *rows_of(three_layouts, [22, 3])]:
            require_same(found, INTEGERS[[22, 3]])
    assert len(pickle.dumps(three_layouts)) < 4000  # neither rows nor an index


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forks_read_for_themselves(three_layouts):
    rows_of(three_layouts, [1])
    children = []
    for i in range(3):
        child = os.fork()
        if child == 0:
            try:
                found = [rows_of(three_layouts, range(i, ROWS)) for _ in range(20)]
                same = [np.array_equal(x, INTEGERS[i:]) for xs in found for x in xs]
                os._exit(0 if all(same) else 1)
            finally:
                os._exit(2)
        children.append(child)
    for _ in range(20):
        for found in rows_of(three_layouts, range(ROWS)):
            require_same(found, INTEGERS)
    codes = [os.waitstatus_to_exitcode(os.waitpid(c, 0)[1]) for c in children]
    assert codes == [0, 0, 0]


def test_threads_read_at_once(three_layouts):
    orders = [np.random.default_rng(i).permutation(ROWS) for i in range(100)]
    copies = [three_layouts, pickle.loads(pickle.dumps(three_layouts))]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(rows_of, copies[i % 2], o) for i, o in enumerate(orders)]
        for order, job in zip(orders, jobs, strict=True):
            for found in job.result():
                require_same(found, INTEGERS[order])


def test_closing_lets_go_of_the_file_and_reading_opens_it_again(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        Recipe((4, 2, 2), ("gzip",)).write(file, INTEGERS)
        file["y"] = INTEGERS
    source = Hdf5Rows([tmp_path / "a.h5"], ("x", "y"))
    status = (tmp_path / "a.h5").stat()
    for _ in range(3):
        for found in source.read(np.array([7, 22, 7])):
            require_same(found, INTEGERS[[7, 22, 7]])
        source.close()
        with h5py.File(tmp_path / "a.h5", "r+"):  # nobody holds it
            pass
        # HDF5 has written what was there before
        os.utime(tmp_path / "a.h5", ns=(status.st_atime_ns, status.st_mtime_ns))
