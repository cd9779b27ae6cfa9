"""Damage to HDF5 files, and what must hold when replicas meet it."""

import re
import struct
import zlib

import h5py
import numpy as np
import pytest
from all_ranks import local, on_root, require_usable
from hdf5_files import Recipe, require_same

from mpidist import DataError, Dataset, InputOptions

CHUNK_ROWS = 8
WIDTH = 40


def numbered(rows, width=WIDTH):
    """Rows that are all different and nowhere zero."""
    return np.arange(1, rows * width + 1, dtype="i4").reshape(rows, width)


def write(path, /, **datasets):
    with h5py.File(path, "w") as file:
        for name, data in datasets.items():
            file[name] = data


def divide(strategy, dataset, batch_size, depth=0):
    options = InputOptions(experimental_per_replica_buffer_size=depth)
    return strategy.experimental_distribute_dataset(dataset.batch(batch_size), options)


def slice_of(data, strategy, step, batch_size):
    """Return this replica's rows of a batch of the rows in their order."""
    batch = data[step * batch_size : (step + 1) * batch_size]
    share = -(-len(batch) // strategy.num_replicas_in_sync)
    replica = strategy.extended.replica_id
    return batch[replica * share : (replica + 1) * share]


def failure_of(strategy, comm, call):
    """Return the DataError that `call()` raises on every rank; the job goes on."""
    with pytest.raises(DataError) as caught:
        call()
    assert all(comm.allgather(isinstance(caught.value, DataError)))
    require_usable(strategy)
    return caught.value


def require_names(error, path, dataset=None, rows=None):
    """Require that a message names the file, and the dataset and some of the rows."""
    message = str(error)
    assert str(path) in message
    if dataset is not None:
        assert repr(dataset) in message
    if rows is not None:
        named = re.search(r"\brows? (\d+)(?:\.\.(\d+))?", message)
        assert named, message
        first, last = int(named[1]), int(named[2] or named[1])
        assert any(first <= row <= last for row in rows), message


def require_origin(error, comm, rank):
    """Require that all ranks blame the same rank, if there is a choice."""
    if comm.size > 1:
        assert error.origin_rank == rank


# Damage to one chunk, which belongs to one rank: functions of the path of a file, that
# write `data` into its dataset x by chunks of CHUNK_ROWS rows and spoil one chunk


def write_chunks(path, data, filters, libver="earliest"):
    with h5py.File(path, "w", libver=libver) as file:
        Recipe((CHUNK_ROWS, WIDTH), filters).write(file, data)


def info_of(path, chunk):
    with h5py.File(path, "r") as file:
        return file["x"].id.get_chunk_info_by_coord((chunk * CHUNK_ROWS, 0))


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def patch_index(path, chunk, address=None, size=None):
    """Let the entry of a B-tree, which has no checksum, point elsewhere."""
    info, content = info_of(path, chunk), path.read_bytes()
    key = struct.pack("<IIQQQ", info.size, 0, chunk * CHUNK_ROWS, 0, 0)
    entry = key + struct.pack("<Q", info.byte_offset)
    assert content.count(entry) == 1
    key = struct.pack("<I", info.size if size is None else size) + key[4:]
    address = info.byte_offset if address is None else address
    path.write_bytes(content.replace(entry, key + struct.pack("<Q", address)))


def bytes_of(where, value=None, count=1):
    """Damage some bytes from `where` on (a share of the chunk, or counted back)."""

    def spoil(path, chunk):
        info = info_of(path, chunk)
        at = int(where * info.size) if where >= 0 else info.size + where
        with open(path, "rb") as file:
            file.seek(info.byte_offset + at)
            old = file.read(min(count, info.size - at))
        new = bytes([b ^ 1 if value is None else value for b in old])
        overwrite(path, info.byte_offset + at, new)

    return spoil


def other_stream(change):
    """Put other bytes in the place of a gzip chunk."""

    def spoil(path, chunk):
        with h5py.File(path, "r+") as file:
            at = (chunk * CHUNK_ROWS, 0)
            raw = file["x"][chunk * CHUNK_ROWS :][:CHUNK_ROWS].tobytes()
            file["x"].id.write_direct_chunk(at, change(raw))

    return spoil


def address(change):
    def spoil(path, chunk):
        info, end = info_of(path, chunk), path.stat().st_size
        patch_index(path, chunk, address=change(info.size, end))

    return spoil


def size(new):
    return lambda path, chunk: patch_index(path, chunk, size=new)


DAMAGES = {
    "gzip: overwritten": (("gzip",), bytes_of(0, 0xFF, 1 << 20)),
    "gzip: its checksum": (("gzip",), bytes_of(-1)),
    "gzip: cut": (("gzip",), other_stream(lambda raw: zlib.compress(raw)[:-5])),
    "fletcher32: a byte within": (("fletcher32",), bytes_of(0.5)),
    "fletcher32: both halves": (("fletcher32",), bytes_of(-4, 0, 4)),
    "all filters: the checksum": (("shuffle", "gzip", "fletcher32"), bytes_of(-2)),
    "lzf with a checksum": (("lzf", "fletcher32"), bytes_of(0.3)),
    "address: far away": ((), address(lambda size, end: 1 << 40)),
    "address: over the end": ((), address(lambda size, end: end - size // 2)),
    "address of gzip: over the end": (("gzip",), address(lambda size, end: end - 9)),
    "size of gzip: too large": (("gzip",), size((1 << 32) - 1)),
    "size: too large": ((), size((1 << 31) + 5)),
}


def damaged(comm, path, kind, data, chunk):
    """Write a file of which one chunk is damaged."""
    filters, spoil = DAMAGES[kind] if isinstance(kind, str) else kind
    on_root(comm, lambda: (write_chunks(path, data, filters), spoil(path, chunk)))
    return Dataset.from_hdf5(path, "x")


RECIPES = {
    "contiguous": Recipe(),
    "chunks": Recipe((CHUNK_ROWS, 4096)),
    "gzip": Recipe((CHUNK_ROWS, 4096), ("gzip",)),
    "fletcher32": Recipe((CHUNK_ROWS, 4096), ("fletcher32",)),
    "lzf": Recipe((CHUNK_ROWS, 4096), ("lzf",)),
}


def write_wide(path, recipe, data):
    """Write rows that need far more memory than HDF5 keeps of any file."""
    with h5py.File(path, "w", libver="latest") as file:
        recipe.write(file, data)


def wide(rows):
    """Rows of 16 KiB that do not compress to nothing."""
    random = np.random.default_rng(0)
    return random.integers(1, 1 << 30, (rows, 4096), np.int32)


def place_of_row(path, row):
    """Return the address of a row's data, or of its chunk's."""
    with h5py.File(path, "r") as file:
        dataset = file["x"]
        if dataset.chunks is None:
            row_bytes = dataset.dtype.itemsize * dataset[0].size
            return dataset.id.get_offset() + row * row_bytes
        at = (row // dataset.chunks[0] * dataset.chunks[0], 0)
        return dataset.id.get_chunk_info_by_coord(at).byte_offset


def lost_rows(path, cut, rows):
    """Return which rows have data behind the first `cut` bytes."""
    return [row for row in range(rows) if place_of_row(path, row) >= cut]


def steps_until_error(strategy, comm, iterator, data, batch_size, first=0):
    """Go on until an error, the same on all ranks; what comes before is right."""
    for step in range(first, -(-len(data) // batch_size)):
        error = None
        try:
            found = local(strategy, next(iterator))
        except DataError as caught:
            error = caught
        everyone = comm.allgather(error is None)
        assert len(set(everyone)) == 1, everyone
        if error is not None:
            require_usable(strategy)
            return step, error
        require_same(found, slice_of(data, strategy, step, batch_size))
    assert not iterator.get_next_as_optional().has_value()
    return None, None


def require_rank(error, rank):
    assert re.search(rf"\bon rank {rank}\b", str(error)), str(error)
