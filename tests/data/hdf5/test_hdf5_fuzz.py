"""HDF5 files with damaged metadata: the rows that HDF5 reads, or an error on all ranks.

Bytes of superblocks, object headers, links, heaps and chunk indexes are changed at
random; bytes of rows are not, which a file has no checksum of.
"""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from hdf5_damage import divide, mine, numbered, on_root, require_usable, slice_of
from hdf5_files import require_same

from mpidist import Dataset
from mpidist.errors import MpidistError

ROWS = 32
DATA = numbered(ROWS, 10)
CHUNKED = {"chunks": (8, 10), "maxshape": (None, 10)}


def plain(file, **options):
    file.create_dataset("g/x", data=DATA, **options)


def linked(file):
    plain(file)
    file["y"], file["g/x"].attrs["a"] = h5py.SoftLink("/g/x"), np.arange(5)
    file["g/z"] = file["g/x"]
    file.move("g/x", "g/w")
    file["g/x"] = h5py.SoftLink("../y")
    file.move("y", "g/y")
    file["y"] = h5py.SoftLink("/g/w")
    del file["g/x"]
    file["g/x"] = h5py.SoftLink("/y")


def virtual(file):
    plain(file)
    file.move("g/x", "source")
    layout = h5py.VirtualLayout(DATA.shape, DATA.dtype)
    layout[...] = h5py.VirtualSource(".", "source", DATA.shape)
    file.create_virtual_dataset("g/x", layout)


def external(file):
    raw = [(f"{file.filename}.raw", 0, DATA.nbytes)]
    file.create_dataset("g/x", DATA.shape, DATA.dtype, external=raw)[...] = DATA


LAYOUTS = {
    "contiguous": plain,
    "links": linked,
    "virtual": virtual,
    "external": external,
    "chunks": lambda file: plain(file, **CHUNKED),
    "gzip": lambda file: plain(file, **CHUNKED, compression="gzip"),
    "lzf": lambda file: plain(file, **CHUNKED, compression="lzf", fletcher32=True),
}


def metadata_of(path, content):
    """Return where a file has something else than rows."""
    is_metadata = np.frombuffer(content, np.uint8) >= 0
    with h5py.File(path) as file:
        places = []
        for name in {"x", "w", "z"} & set(file["g"]) | {"/source"} & set(file):
            dataset = file["g"][name]
            if dataset.chunks:
                dataset.id.chunk_iter(lambda c: places.append((c.byte_offset, c.size)))
            elif not dataset.external and not dataset.is_virtual:
                places.append((dataset.id.get_offset(), DATA.nbytes))
    for start, size in places:
        is_metadata[start : start + size] = False
    return np.flatnonzero(is_metadata)


def write_damaged(path, make, libver, random):
    with h5py.File(path, "w", libver=libver) as file:
        make(file)
    content = path.read_bytes()
    places = random.choice(metadata_of(path, content), random.integers(1, 4))
    damaged = bytearray(content)
    for place in places:
        damaged[place] = random.choice([0, 1, 0xFF, damaged[place] ^ 0x10])
    path.write_bytes(damaged)


def read_by_h5py(path):
    """Return the rows that plain h5py reads, or those before the damage."""
    try:
        with h5py.File(path, "r") as file:
            return file["g/x"][...]
    except Exception:
        return DATA


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_metadata(strategy, comm, mpi_tmp_path, layout, libver):
    random = np.random.default_rng(0)  # used by rank 0
    for trial in range(int(os.environ.get("TRIALS", 12))):
        paths = [mpi_tmp_path / f"{trial}-{i}.h5" for i in range(2)]
        for path in paths:
            on_root(comm, write_damaged, path, LAYOUTS[layout], libver, random)
        dataset = Dataset.from_hdf5(paths[:: random.choice([1, -1])], "g/x")
        for path in paths:
            try:
                divided = divide(strategy, Dataset.from_hdf5(path, "g/x"), ROWS)
                (rows,) = [mine(strategy, batch) for batch in divided]
                error = None
            except MpidistError as caught:
                error = caught
            assert len(set(comm.allgather(type(error)))) == 1, error
            if error is None:
                expected = comm.bcast(read_by_h5py(path) if comm.rank == 0 else None)
                require_same(rows, slice_of(expected, strategy, 0, ROWS))
            else:
                assert str(path) in str(error)
            require_usable(strategy)
