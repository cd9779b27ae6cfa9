"""Any file that h5py reads gives the same rows here: types, filters, layouts."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pickle
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import hdf5_files
import numpy as np
import pytest
from h5py import h5s, h5t
from hdf5_files import Recipe, require_rows, require_same, rows_of, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import Dataset
from mpidist.data.hdf5 import Hdf5Rows
from mpidist.sharding import Permutation

ROWS = 23
NUMBERS = np.random.default_rng(0).normal(size=(ROWS, 3, 2)) * 100
INTEGERS = (np.arange(ROWS * 6, dtype="i4") * 1001).reshape(ROWS, 3, 2)

# Orders in which chunks are filtered; the last ones cannot take every type
PIPELINES = [
    (),
    ("gzip",),
    ("shuffle",),
    ("fletcher32",),
    ("shuffle", "gzip"),
    ("shuffle", "gzip", "fletcher32"),
    ("shuffle", "fletcher32"),
    ("fletcher32", "shuffle", "gzip"),
    ("gzip", "shuffle"),
    ("gzip", "gzip"),
    ("lzf",),
    ("shuffle", "lzf", "fletcher32"),
]
PICKY_PIPELINES = [("nbit",), ("scaleoffset",), ("szip",), ("szip", "fletcher32")]


def noise(type_id):
    """Rows of any bytes, as they lie in a file."""
    size = type_id.get_size()
    random = np.random.default_rng(size).integers(0, 256, (ROWS, size), np.uint8)
    return random.view(f"V{size}").reshape(ROWS)


def of_rows(values):
    """`ROWS` rows of the given values over and over."""
    return np.resize(values, (ROWS, *values.shape[1:]))


def changed(type_id, **values):
    """A copy of a HDF5 type, after calls of `set_...` in the given order."""
    copy = type_id.copy()
    for name, value in values.items():
        getattr(copy, f"set_{name}")(*(value if type(value) is tuple else (value,)))
    return copy


def of_fields(size, **fields):
    """A compound HDF5 type of a size, of fields `name=(offset, type)`."""
    compound = h5t.create(h5t.COMPOUND, size)
    for name, (offset, type_id) in fields.items():
        compound.insert(name.encode(), offset, type_id)
    return compound


def truth(base):
    """What h5py takes for booleans."""
    kind = h5t.enum_create(base)
    kind.enum_insert(b"FALSE", 0)
    kind.enum_insert(b"TRUE", 1)
    return kind


def strings(padding, charset=h5t.CSET_ASCII):
    """Fixed strings of 5 bytes, also with bytes after the end and spaces at it."""
    texts = [
        b"ab\0cd",
        b"abcde",
        b"ab   ",
        b"     ",
        b"\0\0\0\0\0",
        b" a\0\0 ",
        b"a\0  \0",
    ]
    data = of_rows(np.array(texts).view("V5"))
    return changed(h5t.C_S1, size=5, strpad=padding, cset=charset), data


# NumPy's types, each with bytes of which all can be told apart
PLAIN = {
    name: noise(h5t.py_create(np.dtype(name))).view(name)
    for name in [
        *("i1", "u1", "<i2", ">i2", "<u2", ">u2", "<i4", ">i4", "<u4", ">u4"),
        *("<i8", ">i8", "<u8", ">u8", "<f2", ">f2", "<f4", ">f4", "<f8", ">f8"),
        *("<c8", ">c8", "<c16", ">c16", "V3", "V17"),
    ]
}
PLAIN |= {
    "bool": NUMBERS[:, 0, 0] > 0,
    "long double": NUMBERS[:, 0, 0].astype("g") / 3,
    "complex long double": NUMBERS[:, 0, 0].astype("G") * 1j / 3,
    "enum": of_rows(np.arange(2, dtype=h5py.enum_dtype({"A": 0, "B": 1}, "i1"))),
    "big-endian enum": of_rows(
        np.array([0, 300], h5py.enum_dtype({"A": 0, "B": 300}, ">i2"))
    ),
    "bytes": np.array([b"row %d" % i for i in range(ROWS)]),
    "compound": noise(h5t.py_create(np.dtype("i4,f8,S2"))).view("i4,f8,S2"),
    "big-endian compound": noise(h5t.py_create(np.dtype(">i4,>f8,<u2,>c8"))).view(
        ">i4,>f8,<u2,>c8"
    ),
    "aligned compound": np.zeros(ROWS, np.dtype("i1,f8,i2", align=True)),
    "nested compound": of_rows(
        np.array(
            [(1, (2.5, [[3, 4], [5, 6]]), True), (-1, (-2, [[7, 8], [9, 0]]), False)],
            [("a", ">i2"), ("b", [("c", ">f4"), ("d", ">i8", (2, 2))]), ("e", "?")],
        )
    ),
    "compound of one field": np.arange(ROWS).astype([("only", ">u4")]),
}

# Types in the file that memory has no equal of, so the library converts them
ODD = {
    "24 of 32 bits": (changed(h5t.STD_I32LE, precision=24, offset=4), None),
    "7 of 8 bits": (changed(h5t.STD_U8LE, precision=7), None),
    "12 of 16 bits, big-endian": (changed(h5t.STD_U16BE, precision=12), None),
    "bfloat16": (
        changed(
            h5t.IEEE_F32LE, fields=(15, 7, 8, 0, 7), precision=16, size=2, ebias=127
        ),
        None,
    ),
    "big-endian bfloat16": (
        changed(
            h5t.IEEE_F32BE, fields=(15, 7, 8, 0, 7), precision=16, size=2, ebias=127
        ),
        None,
    ),
    "24-bit float": (
        changed(h5t.IEEE_F32LE, fields=(23, 15, 8, 0, 15), precision=24, size=3),
        None,
    ),
    "float of another bias": (changed(h5t.IEEE_F32LE, ebias=120), None),
    "bit field": (h5t.STD_B16LE, None),
    "big-endian bit field": (h5t.STD_B32BE, None),
    "null-terminated strings": strings(h5t.STR_NULLTERM),
    "null-padded strings": strings(h5t.STR_NULLPAD),
    "space-padded strings": strings(h5t.STR_SPACEPAD),
    "UTF-8 strings": strings(h5t.STR_NULLTERM, h5t.CSET_UTF8),
    "wide booleans": (
        truth(h5t.STD_I32BE),
        of_rows(np.array([0, 1, 1], ">i4").view("V4")),
    ),
    "complex with a gap": (
        of_fields(16, r=(0, h5t.IEEE_F32LE), i=(8, h5t.IEEE_F32LE)),
        of_rows(np.arange(12, dtype="<f4").view("V16")),
    ),
    "complex, imaginary part first": (
        of_fields(8, r=(4, h5t.IEEE_F32BE), i=(0, h5t.IEEE_F32BE)),
        of_rows(np.arange(12, dtype=">f4").view("V8")),
    ),
    "fields called i and r": (
        of_fields(8, i=(0, h5t.IEEE_F32LE), r=(4, h5t.IEEE_F32LE)),
        of_rows(np.arange(12, dtype="<f4").view("V8")),
    ),
    "fields with gaps, out of order": (
        of_fields(
            20, a=(12, h5t.IEEE_F64BE), b=(1, h5t.STD_I16BE), c=(6, h5t.STD_U8LE)
        ),
        None,
    ),
    "a field that is converted": (
        of_fields(
            12,
            a=(0, changed(h5t.STD_I32LE, precision=20)),
            b=(4, strings(h5t.STR_SPACEPAD)[0]),
            c=(10, truth(h5t.STD_I16LE)),
        ),
        of_rows(
            np.array([b"\1\2\3\4ab \0c.\1\0", b"\xff\xff\xff\xffabcde.\0\0"], "V12")
        ),
    ),
}
ODD = {name: (t, noise(t) if raw is None else raw) for name, (t, raw) in ODD.items()}

DATES = np.array(["2020-01-01", "NaT", "1969-12-31T23:59"], "M8[ns]")
# What h5py's `create_dataset` is told for types that it has names for
NAMED = {
    "strings": {
        "data": [f"row {i}\N{GREEK SMALL LETTER MU}" * (i % 4) for i in range(ROWS)],
        "dtype": h5py.string_dtype(),
    },
    "ASCII strings": {"data": [b"x" * i for i in range(ROWS)]}
    | {"dtype": h5py.string_dtype("ascii")},
    "dates": {"data": of_rows(DATES).astype(h5py.opaque_dtype(DATES.dtype))},
    "big-endian dates": {
        "data": of_rows(DATES.astype(">M8[ns]")).astype(h5py.opaque_dtype(">M8[ns]"))
    },
    "durations": {
        "data": np.arange(ROWS, dtype="m8[s]").astype(h5py.opaque_dtype("m8[s]"))
    },
    "array type": {"shape": (ROWS,), "dtype": np.dtype((">f4", (3,)))},
    "array type of two dimensions": {"shape": (ROWS, 2), "dtype": np.dtype("(2,3)>i2")},
    "array type of strings": {"shape": (ROWS,), "dtype": np.dtype(("S3", (2,)))},
}


def raw_chunks(data, pipeline, chunk_rows):
    """Return the bytes that chunks of whole rows have after a pipeline."""
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        chunks = (chunk_rows, *data.shape[1:])
        dataset = Recipe(chunks, pipeline).write(file, data)
        file.flush()
        starts = range(0, len(data), chunk_rows)
        at = [(start, *[0] * (data.ndim - 1)) for start in starts]
        return {i: dataset.id.read_direct_chunk(i)[1] for i in at}


def require_all(path, names):
    """Require that all datasets of a file can be read, one by one and together."""
    expected = {name: whole(path, name) for name in names}
    for name in names:
        print("dataset", name)  # is shown if the test fails
        require_rows(Dataset.from_hdf5(path, name), expected[name])
    rows = np.arange(len(expected[names[0]]))[::-2]
    together = rows_of(Dataset.from_hdf5(path, list(names)), rows)
    for name, found in zip(names, together, strict=True):
        require_same(found, expected[name][rows])


def write_pipelines(path, data, type_id=None):
    """Write a dataset for each pipeline that can take the type; return their names."""
    names = []
    with h5py.File(path, "w") as file:
        for filters in [*PIPELINES, *PICKY_PIPELINES]:
            name = "+".join(filters) or "plain"
            try:
                Recipe((5,), filters).write(file, data, name, type_id)
            except (OSError, ValueError):
                assert filters in PICKY_PIPELINES, filters
                continue
            names.append(name)
        for layout in ["contiguous", "compact"]:
            Recipe(layout).write(file, data, layout, type_id)
            names.append(layout)
    return names


@pytest.mark.parametrize("kind", [*PLAIN, *ODD])
def test_every_type_through_every_pipeline(tmp_path, kind):
    type_id, data = ODD[kind] if kind in ODD else (None, PLAIN[kind])
    require_all(tmp_path / "a.h5", write_pipelines(tmp_path / "a.h5", data, type_id))


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("filters", [{}, {"compression": "gzip", "shuffle": True}])
def test_types_that_h5py_has_names_for(tmp_path, kind, filters):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        options = NAMED[kind]
        shape = options.get("shape", (ROWS,))
        file.create_dataset("whole", **options)
        file.create_dataset("x", **options, chunks=(5, *shape[1:]), **filters)
        if np.dtype(options.get("dtype", "i4")).subdtype is not None:
            data = np.arange(file["x"][...].size).reshape(file["x"][...].shape)
            for name in ["whole", "x"]:
                file[name][...] = data.astype(file[name][...].dtype)
    require_all(tmp_path / "a.h5", ["whole", "x"])


@pytest.mark.parametrize("chunks", [None, (4,)])
def test_rows_of_variable_length(tmp_path, chunks):
    """As rows, as fields, as items; some rows were never written."""
    text = h5py.string_dtype()
    kinds = {
        "arrays": (h5py.vlen_dtype("f4"), lambda i: np.arange(i, dtype="f4")),
        "fields": (
            [("a", text), ("b", h5py.vlen_dtype("i2")), ("c", ">f4")],
            lambda i: (f"row {i}", np.arange(i), i),
        ),
        "items": (np.dtype((text, (2,))), lambda i: [f"{i}", f"row {i}"]),
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, (dtype, row) in kinds.items():
            dataset = file.create_dataset(name, (ROWS,), dtype, chunks=chunks)
            for i in range(3, 15):
                dataset[i] = row(i)
    require_all(tmp_path / "a.h5", list(kinds))


def test_references_can_be_followed(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        for i in range(4):
            file[f"group/{i}"] = np.arange(i, i + 5)
        refs = file.create_dataset("object", (5,), h5py.ref_dtype, chunks=(2,))
        regions = file.create_dataset("region", (5,), h5py.regionref_dtype)
        for i in range(4):
            refs[i] = file[f"group/{i}"].ref
            regions[i] = file[f"group/{i}"].regionref[1:3]
    rows = [3, 0, 4, 0]
    found, parts = rows_of(Dataset.from_hdf5(path, ["object", "region"]), rows)
    with h5py.File(path, "r") as file:
        for i, ref, region in zip(rows, found, parts, strict=True):
            assert bool(ref) == bool(region) == (i < 4)
            if ref:
                assert file[ref].name == file[region].name == f"/group/{i}"
                assert file[region][region].tolist() == [i + 1, i + 2]


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_numbers_that_only_ml_dtypes_knows(tmp_path, name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = np.arange(ROWS).astype(getattr(ml_dtypes, name))
        file.create_dataset("plain", data=data)
        file.create_dataset("gzip", data=data, chunks=(5,), compression="gzip")
    require_all(tmp_path / "a.h5", ["plain", "gzip"])


def test_a_type_that_has_a_name_in_the_file(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["kind"] = np.dtype([("a", ">i4"), ("b", "f8")])
        data = np.ones(ROWS, file["kind"].dtype)
        file.create_dataset("x", data=data, dtype=file["kind"], chunks=(4,))
    require_all(tmp_path / "a.h5", ["x"])


CHUNKED = {
    "one chunk": Recipe((ROWS, 3, 2)),
    "one chunk, larger than the dataset": Recipe((40, 5, 2), limits=(None, 6, 2)),
    "one row per chunk": Recipe((1, 3, 2)),
    "one number per chunk": Recipe((1, 1, 1)),
    "the last chunk sticks out": Recipe((5, 3, 2)),
    "chunks of columns": Recipe((ROWS, 1, 1)),
    "chunks stick out everywhere": Recipe((4, 2, 2)),
    "far more chunk than row": Recipe((4, 8, 9), limits=(None, 10, 10)),
    "may grow in one dimension": Recipe((4, 2, 2), limits=(None, 3, 2)),
    "may grow in another dimension": Recipe((4, 2, 2), limits=(ROWS, None, 2)),
    "may grow in two dimensions": Recipe((4, 2, 2), limits=(None, None, 2)),
    "may grow to a limit": Recipe((4, 2, 2), limits=(90, 3, 4)),
    "never written": Recipe((4, 3, 2), written=()),
    "never written, with a fill value": Recipe((4, 3, 2), fill=7, written=()),
    "some chunks written": Recipe((4, 2, 1), fill=-7, written=(np.s_[9:14, :2, 0],)),
    "some rows written": Recipe((4, 3, 2), fill=7, written=(np.s_[2:3], np.s_[21:])),
    "space without filling": Recipe(
        (4, 2, 2), is_filled=False, fill=7, written=(np.s_[:9:3],)
    ),
    "allocated early": Recipe((4, 2, 2), allocate="early", fill=7, written=()),
    "allocated early, written": Recipe((4, 2, 2), allocate="early"),
    "allocated early, not filled": Recipe(
        (4, 3, 2), allocate="early", is_filled=False, written=(np.s_[3:6],)
    ),
    "allocated late": Recipe((4, 2, 2), allocate="late", written=(np.s_[6:],)),
    "allocated piecewise": Recipe((4, 2, 2), allocate="incremental"),
    "grown": Recipe((4, 2, 2), limits=(None, None, 2), fill=7, shapes=((40, 5, 2),)),
    "grown by less than a chunk": Recipe(
        (8, 3, 2), limits=(None, 3, 2), fill=7, shapes=((24, 3, 2),)
    ),
    "shrunk": Recipe((4, 2, 2), limits=(None, None, 2), shapes=((10, 2, 2),)),
    "shrunk to no rows": Recipe((4, 2, 2), limits=(None, 3, 2), shapes=((0, 3, 2),)),
    "shrunk and grown again": Recipe(
        (4, 2, 2), limits=(None, None, 2), fill=7, shapes=((9, 2, 2), (30, 3, 2))
    ),
    "shrunk and grown, not filled": Recipe(
        (4, 2, 2),
        limits=(None, None, 2),
        is_filled=False,
        shapes=((9, 2, 2), (30, 3, 2)),
    ),
}
WHOLE = {
    "contiguous": Recipe(),
    "compact": Recipe("compact"),
    "contiguous, never written": Recipe(written=()),
    "contiguous, never written, with a fill value": Recipe(written=(), fill=7),
    "contiguous, partly written": Recipe(fill=-7, written=(np.s_[3:9], np.s_[20:, 1])),
    "contiguous, allocated early": Recipe(allocate="early", fill=7, written=()),
    "contiguous, not filled": Recipe(
        allocate="early", is_filled=False, fill=7, written=(np.s_[2:4],)
    ),
    "compact, partly written": Recipe("compact", fill=7, written=(np.s_[2:4],)),
}
VERSIONS = {
    "earliest": {"libver": "earliest"},
    "v108": {"libver": ("v108", "v108")},
    "v110": {"libver": ("v110", "v110")},
    "latest": {"libver": "latest"},
    "earliest after a user block": {"libver": "earliest", "userblock_size": 512},
    "latest after a user block": {"libver": "latest", "userblock_size": 1024},
}


@pytest.mark.parametrize("layout", CHUNKED)
def test_every_layout_of_chunks(tmp_path, layout):
    """In every version of the format, so with every kind of chunk index."""
    for version, options in VERSIONS.items():
        names = []
        print(version)
        with h5py.File(tmp_path / f"{version}.h5", "w", **options) as file:
            for filters in [(), ("gzip",), ("shuffle", "gzip", "fletcher32")]:
                data = NUMBERS.astype(">f4") if filters == ("gzip",) else INTEGERS
                names.append("+".join(filters) or "plain")
                recipe = dataclasses.replace(CHUNKED[layout], filters=filters)
                recipe.write(file, data, names[-1])
        require_all(tmp_path / f"{version}.h5", names)


@pytest.mark.parametrize("layout", WHOLE)
def test_every_layout_without_chunks(tmp_path, layout):
    for version, options in VERSIONS.items():
        names = ["<i4", ">f8", ">c8"]
        print(version)
        with h5py.File(tmp_path / f"{version}.h5", "w", **options) as file:
            for dtype in names:
                WHOLE[layout].write(file, NUMBERS.astype(dtype), dtype)
        require_all(tmp_path / f"{version}.h5", names)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (5, 0), (5, 2, 0, 3), (1,), (1, 1, 1)])
def test_few_rows_and_rows_of_no_bytes(tmp_path, shape):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        data = np.arange(np.prod(shape), dtype="i8").reshape(shape)
        chunks = tuple(max(1, n - 1) for n in shape)
        limits = (None, *shape[1:])
        Recipe().write(file, data, "contiguous")
        Recipe(chunks, ("gzip",), limits=limits).write(file, data, "gzip")
        Recipe(chunks, limits=limits).write(file, data, "chunks")
    for name in ["contiguous", "gzip", "chunks"]:
        require_rows(Dataset.from_hdf5(tmp_path / "a.h5", name), data)


@pytest.mark.parametrize("dimensions", range(1, 7))
def test_rows_of_any_dimensions(tmp_path, dimensions):
    shape = (7, 3, 2, 5, 2, 3)[:dimensions]
    data = np.arange(np.prod(shape), dtype="u2").reshape(shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        Recipe((2,) * dimensions, ("shuffle", "gzip")).write(file, data, "gzip")
        Recipe((3, 2, 1, 2, 1, 2)[:dimensions]).write(file, data, "chunks")
    for name in ["gzip", "chunks"]:
        require_rows(Dataset.from_hdf5(tmp_path / "a.h5", name), data)


# Each kind of index beyond its first block, by the version and maxshape it comes from
INDEXES = {
    "B-tree": ("earliest", (None,), None),
    "B-tree of fixed shape": ("earliest", None, None),
    "implicit": ("latest", None, "early"),
    "fixed array": ("latest", None, None),
    "extensible array": ("latest", (None,), None),
    "second B-tree": ("latest", (None, None), None),
}


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("filters", [(), ("shuffle", "gzip")])
def test_thousands_of_chunks_written_in_any_order(tmp_path, index, filters):
    libver, limits, allocate = INDEXES[index]
    data = np.random.default_rng(0).integers(0, 1 << 30, 2400)
    data = data.reshape(-1, 2) if limits == (None, None) else data
    chunks = (1,) * data.ndim
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        recipe = Recipe(chunks, filters, limits, allocate=allocate, written=(), fill=3)
        dataset = recipe.write(file, data)
        order = np.random.default_rng(1).permutation(len(data))
        for i in order[: len(data) - 100].tolist():
            dataset[i] = data[i]
    require_rows(Dataset.from_hdf5(tmp_path / "a.h5", "x"), whole(tmp_path / "a.h5"))


PLACES = {
    "deep in groups": "group/deep/x",
    "by an absolute path": "/group/deep/x",
    "by a roundabout path": "group//./deep/x",
    "by a soft link": "soft",
    "by a soft link to a group": "soft group/x",
    "by a hard link": "hard",
    "by a name of several scripts": "\N{GREEK SMALL LETTER MU} and \N{CJK RADICAL SUN}",
    "in another file": "elsewhere",
    "in a group of another file": "group elsewhere/deep/x",
    "by a soft link to another file": "soft elsewhere",
}


def write_places(folder):
    """Write a file whose names lead to datasets here and in another file."""
    for name, data in [("there.h5", INTEGERS), ("here.h5", NUMBERS)]:
        with h5py.File(folder / name, "w") as file:
            # The same addresses in both files hold other numbers
            group = file.create_group("group/deep")
            group.create_dataset("x", data=data, chunks=(5, 3, 2), compression="gzip")
            group["contiguous"] = data
    with h5py.File(folder / "here.h5", "a") as file:
        file["soft"] = h5py.SoftLink("/group/deep/x")
        file["soft group"] = h5py.SoftLink("group/deep")
        file["hard"] = file["group/deep/x"]
        file[PLACES["by a name of several scripts"]] = NUMBERS
        file["elsewhere"] = h5py.ExternalLink("there.h5", "group/deep/x")
        file["contiguous elsewhere"] = h5py.ExternalLink(
            "there.h5", "group/deep/contiguous"
        )
        file["group elsewhere"] = h5py.ExternalLink("there.h5", "group")
        file["soft elsewhere"] = h5py.SoftLink("/elsewhere")
    return folder / "here.h5"


def test_datasets_are_found_wherever_a_name_leads(tmp_path):
    names = [*PLACES.values(), "contiguous elsewhere"]
    require_all(write_places(tmp_path), names)
    inside = Dataset.from_hdf5(tmp_path / "here.h5", "elsewhere")
    require_rows(inside, INTEGERS)


@pytest.mark.parametrize("absolute", [True, False])
def test_rows_in_external_storage(tmp_path, monkeypatch, absolute):
    monkeypatch.chdir(tmp_path)
    folder = str(tmp_path) + "/" if absolute else ""
    storage = {
        "one": [(f"{folder}one.bin", 0, h5py.h5f.UNLIMITED)],
        "parts": [(f"{folder}{i}.bin", 3 + i, 200) for i in range(4)],
        "short": [(f"{folder}short.bin", 0, h5py.h5f.UNLIMITED)],
        "missing": [(f"{folder}missing.bin", 0, h5py.h5f.UNLIMITED)],
    }
    with h5py.File("a.h5", "w") as file:
        for name, parts in storage.items():
            file.create_dataset(name, INTEGERS.shape, ">i4", external=parts)
            if name != "missing":
                file[name][...] = INTEGERS
    os.truncate("short.bin", 100)  # the rest is fill value to HDF5
    require_all(tmp_path / "a.h5", list(storage)[:3])


def write_virtual(folder):
    """Write files of which one shows rows of the others, and others that are gone."""
    for i in range(3):
        with h5py.File(folder / f"source{i}.h5", "w") as file:
            part = INTEGERS[6 * i : 6 * i + 6]
            options = {"chunks": (4, 2, 2), "compression": "gzip"} if i == 1 else {}
            file.create_dataset("d", data=part.astype(">i4" if i else "<i8"), **options)
    shape = INTEGERS.shape
    layouts = {name: h5py.VirtualLayout(shape, "i4") for name in ["files", "columns"]}
    for i in range(4):  # the last file does not exist, the last rows have no source
        source = h5py.VirtualSource(f"source{i}.h5", "d", (6, 3, 2))
        layouts["files"][6 * i : min(6 * i + 6, 22)] = source[: min(6, 22 - 6 * i)]
    for i in range(2):
        source = h5py.VirtualSource(".", "own", (ROWS, 3))
        layouts["columns"][:, :, 1 - i] = source
    with h5py.File(folder / "virtual.h5", "w", libver="latest") as file:
        own = INTEGERS[:, :, 0]
        file.create_dataset("own", data=own, chunks=(5, 2), compression="gzip")
        for name, layout in layouts.items():
            file.create_virtual_dataset(name, layout, fillvalue=-5)
            file.create_virtual_dataset(f"{name} without fill value", layout)
    return folder / "virtual.h5"


def test_virtual_datasets(tmp_path):
    names = ["files", "columns"]
    names += [f"{name} without fill value" for name in names]
    path = write_virtual(tmp_path)
    assert (whole(path, "files")[18:] == -5).all()  # h5py does find them missing
    require_all(path, names)


def test_a_virtual_dataset_of_sources_that_grow(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        source = file.create_dataset(
            "d", (4, 2), "i4", maxshape=(None, 2), chunks=(3, 2)
        )
        layout = h5py.VirtualLayout((4, 2), "i4", maxshape=(None, 2))
        every = (slice(0, h5s.UNLIMITED), slice(None))
        layout[every] = h5py.VirtualSource(source)[every]
        file.create_virtual_dataset("x", layout)
        source.resize((9, 2))
        source[...] = np.arange(18).reshape(9, 2)
    assert len(whole(tmp_path / "a.h5")) == 9
    require_all(tmp_path / "a.h5", ["x"])


FILE_OPTIONS = {
    "user block": {"userblock_size": 512},
    "long user block": {"userblock_size": 4096, "libver": "latest"},
    "core driver": {"driver": "core"},
    "stdio driver": {"driver": "stdio"},
    "order of creation": {"track_order": True},
    "pages": {"fs_strategy": "page", "fs_page_size": 4096},
    "persistent free space": {"fs_strategy": "fsm", "fs_persist": True},
    "aligned": {"alignment_threshold": 1, "alignment_interval": 4096},
    "metadata blocks": {"meta_block_size": 1 << 16},
    "v112": {"libver": ("v112", "v112")},
    "v114": {"libver": ("v114", "v114")},
}


@pytest.mark.parametrize("option", FILE_OPTIONS)
def test_every_kind_of_file(tmp_path, option):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", **FILE_OPTIONS[option]) as file:
        file["removed"] = NUMBERS  # leaves a hole
        Recipe("compact").write(file, INTEGERS, "compact")
        Recipe((4, 2, 2)).write(file, INTEGERS, "chunks")
        del file["removed"]
        Recipe((4, 2, 2), ("shuffle", "gzip")).write(file, NUMBERS, "gzip")
        Recipe().write(file, INTEGERS, "contiguous")
    if "user block" in option:
        with open(path, "r+b") as file:
            file.write(b"#!/bin/sh what users put before a HDF5 file")
    require_all(path, ["compact", "chunks", "gzip", "contiguous"])


def test_paths_of_any_characters_and_links_to_files(tmp_path):
    path = tmp_path / "a \N{GREEK SMALL LETTER MU} (1) #%.h5"
    with h5py.File(path, "w") as file:
        Recipe((4, 2, 2), ("gzip",)).write(file, INTEGERS)
        file["y"] = NUMBERS
    (tmp_path / "link.h5").symlink_to(path.name)
    os.link(path, tmp_path / "hard.h5")
    for one in [path, tmp_path / "link.h5", tmp_path / "hard.h5"]:
        require_all(one, ["x", "y"])


@pytest.mark.parametrize("where", ["relative", "other folder"])
def test_relative_paths_stay_what_they_were(tmp_path, monkeypatch, where):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        Recipe((4, 2, 2), ("gzip",)).write(file, INTEGERS)
        file["y"] = INTEGERS
    monkeypatch.chdir(tmp_path)
    dataset = Dataset.from_hdf5("a.h5", ["x", "y"])
    if where == "other folder":
        assert len(dataset) == ROWS
        monkeypatch.chdir("/")
    x, y = rows_of(dataset, range(ROWS))
    require_same(x, INTEGERS)
    require_same(y, INTEGERS)


@pytest.mark.parametrize("filters", [("shuffle", "gzip"), ("fletcher32",), ()])
def test_chunks_that_stick_out_may_be_stored_unfiltered(tmp_path, filters):
    """The chunk index does not tell; only the dataset's properties do."""
    recipe = Recipe((4, 2, 2), filters, edges_as_they_are=True)
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        try:
            recipe.write(file, INTEGERS)
        except LookupError as error:
            pytest.skip(str(error))
        grows = dataclasses.replace(recipe, limits=(None, 3, 2), shapes=((40, 3, 2),))
        grows.write(file, INTEGERS, "grown")
        even = dataclasses.replace(recipe, layout=(ROWS, 3, 1))
        even.write(file, INTEGERS, "even")
    for name in ["x", "grown", "even"]:
        require_all(tmp_path / "a.h5", [name])


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_chunks_may_have_skipped_any_of_the_filters(tmp_path, libver):
    """As HDF5 does with what a filter cannot make smaller."""
    pipeline = ("shuffle", "gzip", "fletcher32")
    data = np.arange(8 * 5, dtype=">u4").reshape(40, 1) * 1001
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        dataset = Recipe((5, 1), pipeline, written=()).write(file, data)
        for mask in range(8):
            kept = [name for i, name in enumerate(pipeline) if not mask >> i & 1]
            chunk = raw_chunks(data, tuple(kept), 5)[mask * 5, 0]
            dataset.id.write_direct_chunk((mask * 5, 0), chunk, filter_mask=mask)
    np.testing.assert_array_equal(whole(tmp_path / "a.h5"), data)
    require_all(tmp_path / "a.h5", ["x"])


@pytest.mark.parametrize("pipeline", [p for p in PIPELINES if p], ids="+".join)
def test_chunks_that_do_not_become_smaller(tmp_path, pipeline):
    data = np.random.default_rng(0).integers(0, 256, (ROWS, 1001), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        Recipe((4, 1001), pipeline).write(file, data)
        Recipe((4, 100), pipeline).write(file, data, "narrow")
    require_all(tmp_path / "a.h5", ["x", "narrow"])


def checksum_of_hdf5_1_6(chunk):
    """Swap the bytes of a checksum as HDF5 1.6.2 did, which is still accepted."""
    a, b, c, d = chunk[-4:]
    return chunk[:-4] + bytes([b, a, d, c])


# What other programs may have written in place of a chunk that h5py has filtered
CHUNKS_OF_OTHERS = {
    "the best compression": ("gzip", lambda raw: zlib.compress(raw, 9)),
    "no compression": ("gzip", lambda raw: zlib.compress(raw, 0)),
    "more after the stream": ("gzip", lambda raw: zlib.compress(raw) + b"more"),
    "a stream of more than a chunk": ("gzip", lambda raw: zlib.compress(raw + b"more")),
    "an old checksum": ("fletcher32", None),
}


@pytest.mark.parametrize("kind", CHUNKS_OF_OTHERS)
def test_chunks_that_other_programs_wrote(tmp_path, kind):
    name, compress = CHUNKS_OF_OTHERS[kind]
    data = np.random.default_rng(0).integers(0, 99, (20, 7), np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = Recipe((5, 7), (name,)).write(file, data)
        for at, chunk in raw_chunks(data, (name,), 5).items():
            raw = data[at[0] : at[0] + 5].tobytes()
            chunk = checksum_of_hdf5_1_6(chunk) if compress is None else compress(raw)
            dataset.id.write_direct_chunk(at, chunk)
    np.testing.assert_array_equal(whole(tmp_path / "a.h5"), data)
    require_all(tmp_path / "a.h5", ["x"])


def test_checksums_of_every_length_of_chunk(tmp_path):
    """Sums of more than 720 bytes are folded, an odd last byte counts as high."""
    widths = [1, 2, 3, 359, 360, 361, 719, 720, 721, 1441, 5000]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for width in widths:
            random = np.random.default_rng(width)
            data = random.integers(250, 256, (5, width), np.uint8)
            Recipe((1, width), ("fletcher32",)).write(file, data, str(width))
            Recipe((1, width), ("fletcher32",)).write(file, data * 0, f"{width} zeros")
    for width in widths:
        require_all(tmp_path / "a.h5", [str(width), f"{width} zeros"])


def test_addresses_beyond_4_gib(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        sparse = Recipe(allocate="early", is_filled=False, written=(np.s_[-1:],))
        hole = np.broadcast_to(np.uint8(9), (5 << 30,))
        sparse.write(file, hole, "hole")
        Recipe().write(file, INTEGERS, "contiguous")
        Recipe((4, 2, 2)).write(file, INTEGERS, "chunks")
        Recipe((4, 2, 2), ("gzip",)).write(file, INTEGERS, "gzip")
        names = ["contiguous", "chunks", "gzip"]
        assert all(file[name].id.get_storage_size() for name in names)
    require_all(tmp_path / "a.h5", names)
    rows = [len(hole) - 1, 0, 1 << 32, len(hole) - 2]
    found = rows_of(Dataset.from_hdf5(tmp_path / "a.h5", "hole"), rows)
    assert found.tolist() == [9, 0, 0, 0]


@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_a_few_written_rows_of_very_many(tmp_path, libver):
    """No table may be as long as the dataset, or have an entry for each chunk."""
    rows, limits = (1 << 40, None) if libver == "earliest" else (1 << 40, (None,))
    with h5py.File(tmp_path / "a.h5", "w", libver=libver) as file:
        dataset = file.create_dataset(
            "x", (rows,), "i4", chunks=(1024,), maxshape=limits, fillvalue=-1
        )
        for start in [0, 1 << 20, rows - 2 if libver == "earliest" else 1 << 21]:
            dataset[start : start + 2] = [start % 1000, 7]
    wanted = [1 << 20, rows - 1, 1, 1 << 30, rows - 2, (1 << 20) + 2, 0, 1 << 21, 2]
    with h5py.File(tmp_path / "a.h5", "r") as file:
        expected = [int(file["x"][i]) for i in wanted]
    dataset = Dataset.from_hdf5(tmp_path / "a.h5", "x")
    assert len(dataset) == rows
    assert rows_of(dataset, wanted).tolist() == expected


@pytest.mark.parametrize("locking", [None, False])
@pytest.mark.parametrize("flush", [True, False])
def test_a_file_that_this_process_still_writes(tmp_path, locking, flush):
    """What h5py shows then may be in memory only."""
    path = tmp_path / "a.h5"
    recipes = {
        "contiguous": Recipe(),
        "compact": Recipe("compact"),
        "chunks": Recipe((4, 2, 2)),
        "gzip": Recipe((4, 2, 2), ("shuffle", "gzip")),
        "partly": Recipe((4, 2, 2), fill=7, written=(np.s_[5:9],)),
    }
    with h5py.File(path, "w", locking=locking) as file:
        for name, recipe in recipes.items():
            recipe.write(file, INTEGERS * 0, name)
        if flush:
            file.flush()
        for name, recipe in recipes.items():
            for region in recipe.written:
                file[name][region] = INTEGERS[region]
        if flush:
            file.flush()
        for name in recipes:
            require_rows(Dataset.from_hdf5(path, name), file[name][...])


def test_a_file_can_be_read_by_others_at_the_same_time(tmp_path):
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        Recipe((4, 2, 2), ("gzip",)).write(file, INTEGERS)
        file["y"] = INTEGERS
    with h5py.File(path, "r") as file:
        for _ in range(2):
            x, y = rows_of(Dataset.from_hdf5(path, ["x", "y"]), [3, 22])
            require_same(x, INTEGERS[[3, 22]])
            require_same(y, INTEGERS[[3, 22]])
        require_same(file["x"][...], INTEGERS)


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
    for _ in range(3):
        for found in source.read(np.array([7, 22, 7])):
            require_same(found, INTEGERS[[7, 22, 7]])
        source.close()
        with h5py.File(tmp_path / "a.h5", "r+"):  # nobody holds it
            pass


# Structures of names, and how to make them of what a list of three names gives
STRUCTURES = {
    "a name": ("x", lambda x, y, z: x),
    "a list": (["x", "y", "z"], lambda x, y, z: (x, y, z)),
    "a list of one": (["y"], lambda x, y, z: (y,)),
    "a tuple": (("z", "x"), lambda x, y, z: (z, x)),
    "a name twice": (["y", "y"], lambda x, y, z: (y, y)),
    "a dict": ({"image": "x", "label": "y"}, lambda x, y, z: {"image": x, "label": y}),
    "a dict of one": ({"x": "z"}, lambda x, y, z: {"x": z}),
}
COUNTS = [3, 0, 17, 1, 1, 0, 40, 2, 5, 9] * 4


def write_files(folder, counts):
    """Write files of datasets of unlike layouts, also from file to file."""
    rows = np.arange(sum(counts))
    data = {
        "x": (rows[:, None] * 100 + np.arange(6)).astype("f4").reshape(-1, 3, 2),
        "y": rows.astype("i8"),
        "z": rows[:, None] % [7, 11, 13] == 0,
    }
    layouts = itertools.cycle([False, True, True, False, True])
    starts = np.cumsum([0, *counts])
    for i, (start, stop) in enumerate(itertools.pairwise(starts.tolist())):
        with h5py.File(
            folder / f"{i:03}.h5", "w", libver=["earliest", "latest"][i % 2]
        ) as file:
            for name, values in data.items():
                part = values[start:stop]
                order = "<>"[i % 2]  # the byte order may differ, the dtype is the same
                part = part.astype(part.dtype.newbyteorder(order))
                recipe = Recipe()
                if next(layouts):
                    chunks = (4, *values.shape[1:])
                    limits = (None, *values.shape[1:])
                    recipe = Recipe(chunks, PIPELINES[i % 6], limits)
                recipe.write(file, part, name)
    return data


@pytest.mark.parametrize("structure", STRUCTURES)
def test_many_files_of_few_rows(tmp_path, structure):
    data = write_files(tmp_path, COUNTS)
    names, select = STRUCTURES[structure]
    dataset = Dataset.from_hdf5(str(tmp_path / "*.h5"), names)
    assert len(dataset) == sum(COUNTS)
    for rows in hdf5_files.patterns(sum(COUNTS)):
        require_nest(rows_of(dataset, rows), select(*(v[rows] for v in data.values())))
    start = 0
    for batch in dataset.batch(50):
        part = slice(start, start + 50)
        require_nest(batch, select(*(values[part] for values in data.values())))
        start += 50
    assert start >= sum(COUNTS)


def require_nest(found, expected):
    """Require the same structure of the same arrays."""
    assert type(found) is type(expected)
    if isinstance(expected, tuple):
        for one, other in zip(found, expected, strict=True):
            require_same(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            require_same(found[key], value)
    else:
        require_same(found, expected)


def require_divided(strategy, dataset, expected, batch_size, seed=None):
    """Require that replicas get their slices of the batches of all rows, in order."""
    n = len(expected[0])
    shuffled = dataset if seed is None else dataset.shuffle(seed=seed)
    divided = strategy.experimental_distribute_dataset(shuffled.batch(batch_size))
    order = np.arange(n) if seed is None else Permutation(n, seed)(np.arange(n))
    replica, replicas = strategy.extended.replica_id, strategy.num_replicas_in_sync
    step = -1
    for step, batch in enumerate(divided):
        rows = order[step * batch_size : (step + 1) * batch_size]
        share = -(-len(rows) // replicas)
        mine = rows[replica * share : (replica + 1) * share]
        for value, values in zip(batch, expected, strict=True):
            (found,) = strategy.experimental_local_results(value)
            require_same(found, values[mine])
    assert step + 1 == len(divided) == -(-n // batch_size)


def written_by_root(comm, folder, write):
    """Call `write(path)` on one rank and return the path on all."""
    path = folder / "a.h5"
    if comm.rank == 0:
        write(path)
    comm.Barrier()
    return path


@pytest.mark.parametrize("kind", [*PLAIN, *ODD])
def test_replicas_get_their_rows_of_every_type(strategy, comm, mpi_tmp_path, kind):
    type_id, data = ODD[kind] if kind in ODD else (None, PLAIN[kind])
    path = written_by_root(
        comm, mpi_tmp_path, lambda path: write_pipelines(path, data, type_id)
    )
    names = ["plain", "shuffle+gzip+fletcher32", "contiguous"]
    expected = [whole(path, name) for name in names]
    dataset = Dataset.from_hdf5(path, names)
    require_divided(strategy, dataset, expected, 7)
    require_divided(strategy, dataset, expected, 8, seed=1)


def write_layouts(path):
    with h5py.File(path, "w", libver="latest", userblock_size=512) as file:
        for name, recipe in (CHUNKED | WHOLE).items():
            if not recipe.shapes:
                recipe.write(file, INTEGERS, name)
                if name in CHUNKED:
                    recipe = dataclasses.replace(recipe, filters=("shuffle", "gzip"))
                    recipe.write(file, INTEGERS, f"{name}, gzip")


def test_replicas_get_their_rows_of_every_layout(strategy, comm, mpi_tmp_path):
    path = written_by_root(comm, mpi_tmp_path, write_layouts)
    with h5py.File(path, "r") as file:
        expected = {name: file[name][...] for name in file}
    dataset = Dataset.from_hdf5(path, list(expected))
    for batch_size in [1, 6, ROWS + 1]:
        require_divided(strategy, dataset, list(expected.values()), batch_size)
        require_divided(strategy, dataset, list(expected.values()), batch_size, seed=3)


@pytest.mark.parametrize("make", [write_places, write_virtual])
def test_replicas_get_their_rows_of_other_files(strategy, comm, mpi_tmp_path, make):
    written_by_root(comm, mpi_tmp_path, lambda path: make(mpi_tmp_path))
    path, names = {
        write_places: ("here.h5", ["elsewhere", "soft", "contiguous elsewhere"]),
        write_virtual: ("virtual.h5", ["files", "columns"]),
    }[make]
    expected = [whole(mpi_tmp_path / path, name) for name in names]
    dataset = Dataset.from_hdf5(mpi_tmp_path / path, names)
    require_divided(strategy, dataset, expected, 6, seed=2)


def test_replicas_get_their_rows_of_many_files(strategy, comm, mpi_tmp_path):
    written_by_root(comm, mpi_tmp_path, lambda _: write_files(mpi_tmp_path, COUNTS))
    files = sorted(mpi_tmp_path.glob("*.h5"))
    expected = [np.concatenate([whole(path, n) for path in files]) for n in "xyz"]
    dataset = Dataset.from_hdf5(files, ["x", "y", "z"])
    for batch_size in [9, 64]:
        require_divided(strategy, dataset, expected, batch_size)
        require_divided(strategy, dataset, expected, batch_size, seed=5)


RANDOM_TYPES = [
    *("u1", "<i2", ">i4", "<f4", ">f8", "<f2", ">c8", "S3", "V5"),
    "i1,>f4,S2",
]


@st.composite
def chunked_recipes(draw, shape):
    """Draw how a dataset of a shape is cut into chunks, written and resized."""
    chunks = tuple(draw(st.integers(1, n + 3)) for n in shape)
    limits = tuple(
        draw(st.sampled_from([None, max(n, chunk), max(n, chunk) + 5]))
        for n, chunk in zip(shape, chunks, strict=True)
    )
    filters = draw(st.lists(st.sampled_from(["gzip", "shuffle", "lzf"]), max_size=3))
    if draw(st.booleans()):
        filters.insert(draw(st.integers(0, len(filters))), "fletcher32")
    rows = [
        draw(st.integers(0, n + 9 if limit is None else limit))
        for n, limit in [(shape[0], limits[0])] * draw(st.integers(0, 3))
    ]
    return Recipe(
        chunks,
        tuple(filters),
        limits,
        allocate=draw(st.sampled_from([None, "early", "late", "incremental"])),
        shapes=tuple((n, *shape[1:]) for n in rows),
    )


@st.composite
def recipes(draw, shape):
    """Draw how a dataset of a shape is made."""
    layouts = st.sampled_from([Recipe(), Recipe("compact"), Recipe(allocate="early")])
    recipe = draw(st.one_of(layouts, *[chunked_recipes(shape)] * 3))
    cuts = st.integers(0, 12)
    region = st.tuples(*[st.builds(slice, cuts, cuts, st.integers(1, 3))] * len(shape))
    return dataclasses.replace(
        recipe,
        fill=draw(st.sampled_from([None, 7])),
        written=draw(st.sampled_from([(...,), ()])) or tuple(draw(st.lists(region))),
    )


@st.composite
def several_files(draw):
    """Draw a dtype and, for each file, its options, its data and how it is made."""
    dtype = np.dtype(draw(st.sampled_from(RANDOM_TYPES)))
    row_shape = draw(st.lists(st.integers(0, 5), max_size=3))
    files = []
    for count in draw(st.lists(st.integers(0, 20), min_size=1, max_size=3)):
        shape = (count, *row_shape)
        size = int(np.prod(shape)) * dtype.itemsize
        random = np.random.default_rng(draw(st.integers(0, 99)))
        data = random.integers(0, draw(st.sampled_from([3, 256])), size, np.uint8)
        recipe = draw(recipes(shape))
        if dtype.kind in "SV":
            recipe = dataclasses.replace(recipe, fill=None)
        options = {
            "libver": draw(st.sampled_from(["earliest", "v110", "latest"])),
            "userblock_size": draw(st.sampled_from([0, 0, 512, 1024])),
        }
        files.append((options, data.view(dtype).reshape(shape), recipe))
    return files


@settings(derandomize=True, database=None, deadline=None, max_examples=250)
@given(files=several_files(), seed=st.integers(0, 99))
def test_random_files_are_read_as_h5py_reads_them(files, seed):
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i}.h5") for i in range(len(files))]
        for path, (options, data, recipe) in zip(paths, files, strict=True):
            with h5py.File(path, "w", **options) as file:
                recipe.write(file, data)
        expected = np.concatenate([whole(path) for path in paths])
        dataset = Dataset.from_hdf5(paths, "x")
        assert len(dataset) == len(expected)
        random = np.random.default_rng(seed)
        most = 9 if len(expected) else 0
        few = random.integers(0, max(1, len(expected)), random.integers(0, most + 1))
        for rows in [few, np.sort(few), np.unique(few), np.arange(len(expected))]:
            require_same(rows_of(dataset, rows), expected[rows])
