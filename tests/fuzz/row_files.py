"""HDF5 files of rows in random layouts, and how they change.

Each row has a number, `id`, which no other row of any version of a file has, and a
value `x`, which is what plain h5py reads.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
import shutil

import h5py
import numpy as np
from hdf5_files import Recipe
from hdf5_kinds import PIPELINES

TYPES = {
    name: np.dtype(name)
    for name in [
        *("i8", "i1", "u2", ">i4", ">u8", "f2", ">f4", "f8", ">f8", "?", "S3", "c8"),
        *("V4", "i4,>f8,S2"),
    ]
}
TYPES |= {
    "enum": h5py.enum_dtype({"A": 0, "B": 7}, "i2"),
    "big-endian enum": h5py.enum_dtype({"A": 1, "B": 300}, ">i2"),
}
SHAPES = [(), (), (3,), (2, 3), (5, 1), (0,), (40,), (700,)]
_ROWS_OF_FILE = 1_000_000
ROWS_OF_VERSION = 1000


def first_id(number, version):
    """Return the number of the first row of a version of a file."""
    return number * _ROWS_OF_FILE + version * ROWS_OF_VERSION


def file_of(row):
    """Return the number of the file that has, or had, a row."""
    return row // _ROWS_OF_FILE


_VALUES = {
    "b": lambda r, dtype, shape: r.integers(0, 2, shape) > 0,
    "f": lambda r, dtype, shape: r.normal(size=shape).astype(dtype),
    "c": lambda r, dtype, shape: r.normal(size=shape).astype(dtype),
    "S": lambda r, dtype, shape: r.choice(np.array([b"a", b"xyz", b""], dtype), shape),
}


def values(dtype, shape, seed):
    """Return an array of a dtype."""
    generator = np.random.default_rng(seed)
    if members := h5py.check_enum_dtype(dtype):
        made = generator.choice([*members.values()], shape).astype(dtype.str)
        return made.astype(dtype)
    if dtype.names:
        made = np.zeros(shape, dtype)
        for name in dtype.names:
            made[name] = values(dtype[name], shape, seed)
        return made
    if dtype.kind in _VALUES:
        return _VALUES[dtype.kind](generator, dtype, shape)
    raw = generator.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return np.frombuffer(raw.tobytes(), dtype).reshape(shape)


def _chunked(r, shape):
    """Return a random recipe of chunks, grown and shrunk on the way."""
    chunks = tuple(max(1, r.choice([1, 2, 3, n // 2, n, n + 3])) for n in shape)
    rows = [r.randrange(shape[0] + 9) for _ in range(r.choice([0, 0, 2]))]
    return Recipe(
        chunks,
        r.choice(PIPELINES),
        (None, *(max(pair) for pair in zip(chunks[1:], shape[1:]))),
        allocate=r.choice([None, "early", "late", "incremental"]),
        shapes=tuple((n, *shape[1:]) for n in (*rows, shape[0])),
    )


def _partly(r, shape):
    """Return a recipe with rows that are never written."""
    start = r.randrange(shape[0] + 1)
    recipe = dataclasses.replace(_chunked(r, shape), shapes=())
    return dataclasses.replace(recipe, written=(np.s_[start : start + 5],))


RECIPES = {
    "contiguous": lambda r, shape: Recipe(allocate=r.choice([None, "early"])),
    "compact": lambda r, shape: Recipe(
        "compact" if np.prod(shape) < 2000 else "contiguous"
    ),
    "chunks": _chunked,
    "gzip": lambda r, shape: dataclasses.replace(
        _chunked(r, shape), filters=("shuffle", "gzip")
    ),
    "partly written": _partly,
    "contiguous, partly": lambda r, shape: Recipe(written=(np.s_[2:5],)),
}


def _write(group, fields, r, layout="chunks"):
    """Write both datasets, `x` in the layout and `id` in that or another one."""
    layout_of_id = r.choice([name for name in RECIPES if "partly" not in name])
    for name, data in fields.items():
        recipe = RECIPES[layout if name == "x" else layout_of_id](r, data.shape)
        if name == "id":  # no row loses its number
            recipe = dataclasses.replace(recipe, shapes=())
        recipe.write(group, data, name)


def _plain(file, fields, r, path, layout):
    _write(file, fields, r, layout)


def _linked(file, fields, r, path, layout):
    """Write the datasets elsewhere in the file."""
    _write(file.create_group("g"), fields, r)
    file["x"], file["id"] = h5py.SoftLink("/g/x"), file["g/id"]


def _linked_elsewhere(file, fields, r, path, layout):
    """Write the datasets in another file, and others where they seem to be."""
    _write(file.create_group("g"), {n: a[:-1] for n, a in fields.items()}, r)
    with h5py.File(path.with_suffix(".there.h5"), "w") as there:
        _write(there.create_group("g"), fields, r)
    for name in fields:
        file[name] = h5py.ExternalLink(f"{path.stem}.there.h5", f"g/{name}")


def _external(file, fields, r, path, layout):
    """Write the rows to raw files."""
    for name, data in fields.items():
        raw, final = path.with_suffix(f".{name}.raw"), path.parent.parent
        raw.write_bytes(bytes(16) + np.ascontiguousarray(data).tobytes())
        where = [(str(final / raw.name), 16, max(1, data.nbytes))]
        file.create_dataset(name, data.shape, data.dtype, external=where)


def _virtual(file, fields, r, path, layout):
    """Write the rows to several files, and datasets that show them."""
    rows = len(fields["id"])
    cuts = sorted({0, rows, *(r.randrange(rows + 1) for _ in range(2))})
    layouts = {n: h5py.VirtualLayout(a.shape, a.dtype) for n, a in fields.items()}
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        source = path.with_suffix(f".{i}.h5")
        with h5py.File(source, "w") as part:
            some = {name: data[a:b] for name, data in fields.items()}
            _write(part, some, r)
            for name, data in some.items():
                shown = h5py.VirtualSource(source.name, name, data.shape)
                layouts[name][a:b] = shown
    for name, made in layouts.items():
        file.create_virtual_dataset(name, made)


LAYOUTS = dict.fromkeys(RECIPES, _plain)
LAYOUTS |= {
    "linked": _linked,
    "linked elsewhere": _linked_elsewhere,
    "external": _external,
    "virtual": _virtual,
}
_VERSIONS = ["earliest", "latest", ("v110", "v110")]


class RowFile:
    """A file of rows that rank 0 writes and changes.

    Args:
      path: of the file; others lie beside it.
      number: of the file.
      dtype, shape: of `x`.
    """

    def __init__(self, path, number, dtype, shape):
        self.path, self.number, self.dtype, self.shape = path, number, dtype, shape
        self.version, self.ids, self.how = -1, [], ("contiguous", 0)
        self.is_written = False  # by Hdf5Writer

    def paths(self):
        """Return what `from_hdf5` is given; of a writer, the index or its shards."""
        shards = sorted(self.path.parent.glob(f"{self.path.stem}-*-of-*.h5"))
        is_by_shards = self.is_written and len(shards) > self.version % 2
        return shards if is_by_shards else [self.path]

    def write(self, layout, rows, seed, old):
        """Return files of the next version: their bytes, its ids, and what h5py reads.

        Also the layout that they have.

        Args:
          layout: one of LAYOUTS.
          rows: their number.
          seed: of what is random.
          old: the first values, which stay.
        """
        first = first_id(self.number, self.version + 1)
        ids = [*self.ids[: len(old)], *range(first, first + rows - len(old))]
        x = values(self.dtype, (rows, *self.shape), [first, self.number]).copy()
        for i, value in enumerate(old):
            x[i] = value
        fields = {"id": np.array(ids, "i8"), "x": x}
        if rows == 0 or 0 in self.shape or (old and "partly" in layout):
            layout = "gzip"
        r, folder = random.Random(f"{layout} {seed}"), self.path.parent / "new"
        folder.mkdir()
        options = {"libver": r.choice(_VERSIONS), "userblock_size": r.choice([0, 512])}
        path = folder / self.path.name
        with h5py.File(path, "w", **options) as file:
            LAYOUTS[layout](file, fields, r, path, layout)
        # Raw files are not yet where the file says
        x = native(x if layout == "external" else read(path, "x"))
        if any(x[i].tobytes() != value.tobytes() for i, value in enumerate(old)):
            shutil.rmtree(folder)  # they were lost on the way
            return self.write("contiguous", rows, seed, old)
        parts = {part.name: part.read_bytes() for part in folder.iterdir()}
        shutil.rmtree(folder)
        return parts, ids, x, layout


def read(path, name):
    """Return what h5py reads of a dataset."""
    with h5py.File(path, "r", locking=False) as file:
        return file[name][...]


def native(x):
    """Return an array in the byte order of this machine."""
    members = h5py.check_enum_dtype(x.dtype)
    dtype = np.dtype(x.dtype.str) if members else x.dtype
    dtype = dtype.newbyteorder("=")
    return x.astype(h5py.enum_dtype(members, dtype) if members else dtype)


def _in_place(path, data, other):
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.write(data)
        file.truncate()


def _replace(path, data, other):
    other.write_bytes(data)
    os.replace(other, path)


def _replace_linked(path, data, other):
    """Replace a file that has another name, too, which keeps it."""
    if path.exists():
        os.link(path, other.with_suffix(f".{random.getrandbits(40)}"))
    _replace(path, data, other)


def _removed_before(path, data, other):
    path.unlink(missing_ok=True)
    path.write_bytes(data)


# How the bytes of a file come to its path
PUTS = {
    "in place": _in_place,
    "replace": _replace,
    "replace linked": _replace_linked,
    "removed before": _removed_before,
}
_clock = [0]


def put(folder, parts, how):
    """Write files, each at another time than all earlier ones."""
    for name, data in parts.items():
        path = folder / name
        PUTS[how](path, data, folder / f"{name}.new")
        _clock[0] += 1
        second = 1_700_000_000 + _clock[0]
        os.utime(path, ns=(second * 10**9, second * 10**9 + 7))
