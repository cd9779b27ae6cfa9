"""HDF5 files of all kinds for tests, and what h5py reads of them."""

from __future__ import annotations

import ctypes
import dataclasses
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from h5py import h5d, h5p, h5s, h5t, h5z

from mpidist.data.map_dataset import Epoch

# What each filter's name puts into a pipeline, which runs in the order of the names
FILTERS = {
    "gzip": lambda p: p.set_deflate(4),
    "shuffle": lambda p: p.set_shuffle(),
    "fletcher32": lambda p: p.set_fletcher32(),
    "lzf": lambda p: p.set_filter(h5z.FILTER_LZF, h5z.FLAG_OPTIONAL),
    "nbit": lambda p: p.set_filter(h5z.FILTER_NBIT),
    "scaleoffset": lambda p: p.set_scaleoffset(h5z.SO_INT, 0),
    "szip": lambda p: p.set_szip(h5z.SZIP_NN_OPTION_MASK, 8),
}
_LAYOUTS = {"compact": h5d.COMPACT, "contiguous": h5d.CONTIGUOUS}
_ALLOCATIONS = {
    "early": h5d.ALLOC_TIME_EARLY,
    "late": h5d.ALLOC_TIME_LATE,
    "incremental": h5d.ALLOC_TIME_INCR,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a dataset is made.

    Args:
      layout: a shape of chunks, "contiguous" or "compact".
      filters: names of FILTERS, in the order in which a chunk passes through them.
      limits: the maxshape; None for the shape.
      fill: the fill value; None for HDF5's own, ... for none.
      is_filled: whether new space is filled with it.
      allocate: when space is made: early, late, incremental, or None for HDF5's choice.
      written: the regions that are written; all others keep the fill value.
      shapes: shapes that the dataset gets afterwards, one after the other.
      edges_as_they_are: leave chunks that stick out beyond the dataset unfiltered.
    """

    layout: tuple[int, ...] | str = "contiguous"
    filters: tuple[str, ...] = ()
    limits: tuple[int | None, ...] | None = None
    fill: Any = None
    is_filled: bool = True
    allocate: str | None = None
    written: tuple[Any, ...] = (...,)
    shapes: tuple[tuple[int, ...], ...] = ()
    edges_as_they_are: bool = False

    def properties(self, dtype: np.dtype[Any]) -> h5p.PropDCID:
        """Return the low-level properties of a dataset that is filled with a dtype."""
        properties = h5p.create(h5p.DATASET_CREATE)
        if isinstance(self.layout, str):
            properties.set_layout(_LAYOUTS[self.layout])
        else:
            properties.set_chunk(self.layout)
        for name in self.filters:
            FILTERS[name](properties)
        if self.fill is ...:
            kind = ctypes.c_int64(h5t.STD_I32LE.id)
            hdf5_library().H5Pset_fill_value(ctypes.c_int64(properties.id), kind, None)
        elif self.fill is not None:
            properties.set_fill_value(np.array(self.fill, dtype))
        if not self.is_filled:
            properties.set_fill_time(h5d.FILL_TIME_NEVER)
        if self.allocate is not None:
            properties.set_alloc_time(_ALLOCATIONS[self.allocate])
        if self.edges_as_they_are:
            bit = ctypes.c_uint(2)  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
            hdf5_library().H5Pset_chunk_opts(ctypes.c_int64(properties.id), bit)
        return properties

    def write(
        self,
        file: h5py.File,
        data: Any,
        name: str = "x",
        type_id: h5t.TypeID | None = None,
    ) -> h5py.Dataset:
        """Write a dataset, of `type_id` if the bytes of `data` are in that type."""
        kind = type_id or h5t.py_create(data.dtype, logical=True)
        limits = self.limits
        if limits is not None:
            limits = tuple(h5s.UNLIMITED if n is None else n for n in limits)
        space = h5s.create_simple(data.shape, limits)
        properties = self.properties(data.dtype)
        made = h5d.create(file.id, name.encode(), kind, space, properties)
        dataset = h5py.Dataset(made)
        if type_id is not None:
            made.write(h5s.ALL, h5s.ALL, data, mtype=type_id)
        elif data.size:
            for region in self.written:
                dataset[region] = data[region]
        for shape in self.shapes:
            dataset.resize(shape)
        return dataset


def hdf5_library() -> ctypes.CDLL:
    """Return the library that h5py uses, for functions that h5py does not offer.

    Raises:
      LookupError: it is not a file of its own.
    """
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines}
    found = [p for p in paths if re.search(r"/libhdf5(_serial)?[-.][^/]*$", p)]
    if not found:
        raise LookupError("the HDF5 library was not found")
    return ctypes.CDLL(found[0])


def whole(path: Any, name: str = "x") -> Any:
    """Return what h5py reads of a dataset."""
    with h5py.File(path, "r") as file:
        return file[name][...]


def rows_of(dataset: Any, rows: Any) -> Any:
    """Return the rows with the given numbers of an unbatched `Dataset`."""
    return dataset.pipeline.elements(Epoch(), np.asarray(rows, np.int64))


def patterns(rows: int) -> list[np.ndarray]:
    """Return the numbers of rows as programs ask for them, each at least once."""
    random = np.random.default_rng(rows)
    every = np.arange(rows)
    some = np.flatnonzero(random.random(rows) < 0.4)
    asked = [every, every[::-1], random.permutation(rows), some, every[::5], every[:0]]
    asked += [every[i : i + 1] for i in {0, rows // 2, rows - 1} if 0 <= i < rows]
    if rows:
        asked.append(random.integers(0, rows, rows + 9))  # some of them repeatedly
        asked.append(np.array([rows - 1, 0, 0, rows - 1]))
    return asked


def require_rows(dataset: Any, expected: Any) -> None:
    """Require that all rows of a `Dataset` are as expected, however asked for."""
    assert len(dataset) == len(expected)
    for rows in patterns(len(expected)):
        require_same(rows_of(dataset, rows), expected[rows])


def require_same(found: Any, expected: Any) -> None:
    """Require the same values to the last bit, in native byte order.

    Bytes between the fields of a compound type and in a long double hold nothing.
    """
    dtype = expected.dtype.newbyteorder("=")
    assert type(found) is np.ndarray
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert found.dtype.isnative
    if dtype.names is not None:
        for name in dtype.names:
            require_same(found[name], expected[name])
    elif dtype.hasobject:
        for one, other in zip(found.flat, expected.flat, strict=True):
            _require_same_object(one, other)
    elif dtype.char in "gG":
        np.testing.assert_array_equal(found, expected)
    else:
        one, other = (x.astype(dtype).tobytes() for x in (found, expected))
        is_same = one == other  # not in the assertion, which would print them
        assert is_same, f"bytes of {found!r} and {expected!r} differ"


def _require_same_object(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tolist() == expected.tolist()
    elif not isinstance(expected, h5py.Reference):  # which can only be followed
        assert found == expected
