"""HDF5 files with damaged metadata: the rows that HDF5 reads, or an error on all ranks.

Bytes of superblocks, object headers, links, heaps and chunk indexes are changed at
random, or the file is cut; bytes of rows are not changed, which a file has no checksum
of.
"""

import h5py
import numpy as np
import pytest
from all_ranks import local, on_root, require_usable
from hdf5_damage import divide, numbered, slice_of

from mpidist import DataError, Dataset

ROWS = 32
DATA = numbered(ROWS, 10)
CHUNKED = {"chunks": (8, 10), "maxshape": (None, 10)}


def plain(file, **options):
    file.create_dataset("g/x", data=DATA, **options)


def linked(file):
    plain(file)
    file.move("g/x", "g/w")
    file["y"], file["g/x"] = h5py.SoftLink("/g/w"), h5py.SoftLink("/y")
    file["g/w"].attrs["a"] = np.arange(5)


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
        for dataset in [*file["g"].values(), file.get("source")]:
            if not isinstance(dataset, h5py.Dataset):
                continue
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
    is_cut = random.random() < 0.2
    path.write_bytes(damaged[: random.integers(len(content))] if is_cut else damaged)


def read_by_h5py(path):
    """Return the first rows that plain h5py reads; those before the damage if none."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            rows = file["g/x"][:ROWS]
            return rows.astype(rows.dtype.newbyteorder("="))
    except (OSError, KeyError, RuntimeError, ValueError):
        return DATA


@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_metadata(strategy, comm, mpi_tmp_path, layout, libver):
    random = np.random.default_rng(0)  # rank 0 uses it
    for trial in range(15):
        path = mpi_tmp_path / f"{trial}.h5"
        on_root(comm, write_damaged, path, LAYOUTS[layout], libver, random)
        error = None
        try:
            iterator = iter(divide(strategy, Dataset.from_hdf5(path, "g/x"), ROWS))
            batch = next(iterator, None)
            found = b"" if batch is None else local(strategy, batch).tobytes()
        except DataError as caught:
            error = caught
            assert str(path) in str(error)
        assert len(set(comm.allgather(type(error)))) == 1, error
        require_usable(strategy)
        if error is None:  # what HDF5 does not find can still be there
            expected = comm.bcast(read_by_h5py(path) if comm.rank == 0 else None)
            allowed = [slice_of(rows, strategy, 0, ROWS) for rows in (expected, DATA)]
            assert found in [rows.tobytes() for rows in allowed]
