"""Types, orders of filters and layouts of HDF5 datasets, and files that have them."""

import h5py
import numpy as np
from h5py import h5t
from hdf5_files import Recipe, require_rows, require_same, rows_of, whole

from mpidist import Dataset

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


# NumPy's types, each with bytes of which all can be told apart; others are in fuzz/rows
PLAIN = {
    name: noise(h5t.py_create(np.dtype(name))).view(name)
    for name in [
        *("u1", "<i2", ">i2", ">u2", "<i4", "<u4", ">u4", ">i8", "<u8", ">f2", "<f4"),
        *(">c8", "<c16", ">c16", "V3", "V17"),
    ]
}
PLAIN |= {
    "long double": NUMBERS[:, 0, 0].astype("g") / 3,
    "complex long double": NUMBERS[:, 0, 0].astype("G") * 1j / 3,
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


CHUNKED = {
    "one chunk, larger than the dataset": Recipe((40, 5, 2), limits=(None, 6, 2)),
    "far more chunk than row": Recipe((4, 8, 9), limits=(None, 10, 10)),
    "may grow to a limit": Recipe((4, 2, 2), limits=(90, 3, 4)),
    "never written": Recipe((4, 3, 2), written=()),
    "never written, with a fill value": Recipe((4, 3, 2), fill=7, written=()),
    "some chunks written": Recipe((4, 2, 1), fill=-7, written=(np.s_[9:14, :2, 0],)),
    "some rows written": Recipe((4, 3, 2), fill=7, written=(np.s_[2:3], np.s_[21:])),
    "space without filling": Recipe(
        (4, 2, 2), is_filled=False, fill=7, written=(np.s_[:9:3],)
    ),
    "allocated early": Recipe((4, 2, 2), allocate="early", fill=7, written=()),
    "allocated early, not filled": Recipe(
        (4, 3, 2), allocate="early", is_filled=False, written=(np.s_[3:6],)
    ),
    "grown": Recipe((4, 2, 2), limits=(None, None, 2), fill=7, shapes=((40, 5, 2),)),
    "grown by less than a chunk": Recipe(
        (8, 3, 2), limits=(None, 3, 2), fill=7, shapes=((24, 3, 2),)
    ),
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
    "contiguous, never written": Recipe(written=()),
    "contiguous, never written, with a fill value": Recipe(written=(), fill=7),
    "contiguous, partly written": Recipe(fill=-7, written=(np.s_[3:9], np.s_[20:, 1])),
    "contiguous, allocated early": Recipe(allocate="early", fill=7, written=()),
    "contiguous, not filled": Recipe(
        allocate="early", is_filled=False, fill=7, written=(np.s_[2:4],)
    ),
    "compact, partly written": Recipe("compact", fill=7, written=(np.s_[2:4],)),
}


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


def write_virtual(folder):
    """Write files of which one shows rows of the others."""
    for i in range(3):
        with h5py.File(folder / f"source{i}.h5", "w") as file:
            part = INTEGERS[6 * i : 6 * i + 6]
            options = {"chunks": (4, 2, 2), "compression": "gzip"} if i == 1 else {}
            file.create_dataset("d", data=part.astype(">i4" if i else "<i8"), **options)
    shape = INTEGERS.shape
    layouts = {name: h5py.VirtualLayout(shape, "i4") for name in ["files", "columns"]}
    for i in range(3):  # the last rows have no source
        layouts["files"][6 * i : 6 * i + 6] = h5py.VirtualSource(
            f"source{i}.h5", "d", (6, 3, 2)
        )
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
