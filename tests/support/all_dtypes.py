"""Rows of every dtype that NumPy, ml_dtypes and JAX have, for tests."""

import itertools

import ml_dtypes
import numpy as np

ML = {
    kind.__name__: np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
# Numbers that few bits hold
_FEW = {
    "int1": [0, -1],
    "uint1": [0, 1],
    "int2": [1, 0, -2],
    "float8_e8m0fnu": [1, 2, 4],
}
_COMPOUND = np.dtype([("x", "f4"), ("key", ">i8"), ("y", "u1")])


def _of_fields(names):
    return np.zeros(1, _COMPOUND)[names].dtype


NATIVE = {
    f"{order}{np.dtype(char).name}": np.dtype(char).newbyteorder(order)
    for order, char in itertools.product(
        "=>", "?" + np.typecodes["AllInteger"] + np.typecodes["AllFloat"]
    )
}
COMPOUND = {
    "fields": _COMPOUND,
    "fields in another order": _of_fields(["y", "x"]),
    "fields of a wider row": _of_fields(["key"]),
    "aligned": np.dtype("u1,f8,i2", align=True),
    "nested": np.dtype([("a", _COMPOUND, 2), ("b", ">c8")]),
    "nested, in another order": np.dtype([("a", _of_fields(["y", "x"]), (2, 1))]),
    "subarrays": np.dtype([("m", ">f4", (2, 3)), ("s", "S3")]),
    "overlapping": np.dtype(
        {"names": ["a", "b"], "formats": ["<u4", "<u2"], "offsets": [0, 2]}
    ),
    "with titles": np.dtype([(("a title", "a"), "f4"), ("b", "i2")]),
    "dates": np.dtype([("when", "M8[us]"), ("text", "U2"), ("raw", "V3")]),
    "long double": np.dtype([("g", np.longdouble), ("i", "i1")]),
    "bfloat16 field": np.dtype([("key", "<i4"), ("w", ML["bfloat16"])]),
    "float8 fields": np.dtype([("w", ML["float8_e5m2"], 2), ("v", ML["float8_e4m3fnuz"])]),
    "nested int4": np.dtype([("a", [("q", ML["int4"]), ("f", ">f4")])]),
    "float16 and text": np.dtype([("h", "f2"), ("text", ">U3")]),
}
OTHERS = {
    "M8[s]": np.dtype("M8[s]"),
    ">M8[ms]": np.dtype(">M8[ms]"),
    "m8[5us]": np.dtype("m8[5us]"),
    "M8": np.dtype("M8"),
    "S3": np.dtype("S3"),
    "U2": np.dtype("U2"),
    ">U2": np.dtype(">U2"),
    "V3": np.dtype("V3"),
    "object": np.dtype(object),
    "object field": np.dtype([("o", object), ("x", "f4")]),
    "S0": np.dtype("S0"),
    "U0": np.dtype("U0"),
    "V0": np.dtype("V0"),
    "no fields": np.dtype([]),
    "float0": np.dtype([("float0", "V")]),  # of JAX
}
if hasattr(np.dtypes, "StringDType"):
    OTHERS["StringDType"] = np.dtypes.StringDType()
    OTHERS["StringDType with None"] = np.dtypes.StringDType(na_object=None)
try:
    from numpy._core._rational_tests import rational

    OTHERS["rational"] = np.dtype(rational)  # of a package that nobody knows
except ImportError:
    pass
DTYPES = {**NATIVE, **ML, **COMPOUND, **OTHERS}


def rows(dtype, rank=0, count=4):
    """Rows of a dtype; small numbers, which it holds."""
    made = np.zeros(count, dtype)
    if dtype.names is not None:
        for place, name in enumerate(dtype.names):
            field = dtype[name]
            shape = field.shape
            part = rows(field.base, rank + place, made[name].size)
            made[name] = part.reshape(count, *shape)
        return made
    values = _FEW.get(dtype.name, [1, 0, 3, 2])
    values = [values[(rank + i) % len(values)] for i in range(count)]
    if dtype.kind == "c" or dtype.name in ("complex32", "bcomplex32"):
        values = [v + 1j for v in values]
    if dtype.kind in "SUTO":
        values = [f"{v}é"[: 1 if dtype.kind == "S" else 2] for v in values]
        values = [v.encode() for v in values] if dtype.kind == "S" else values
    if dtype.kind in "mM":
        values = np.array(values, "i8").view(f"{dtype.kind}8[s]").tolist() if dtype == np.dtype(dtype.kind+"8[s]") else np.array(values, "i8").astype(dtype).tolist() if dtype.name != "datetime64" else [np.datetime64("NaT")]*count
    if dtype.kind == "V" and dtype.num == 20:
        return np.frombuffer(bytes(range(rank, rank + count * dtype.itemsize)), dtype) if dtype.itemsize else made
    if dtype.itemsize:
        made[...] = np.array(values).astype(dtype) if dtype.num > 255 and dtype.kind!="T" else values
    return made


def is_like(got, want):
    """Whether arrays have one dtype, apart from layout and text, and equal values."""
    if not isinstance(got, np.ndarray) or got.shape != want.shape:
        return False
    if want.dtype.names is not None:
        return got.dtype.names == want.dtype.names and all(is_like(got[name], want[name]) for name in want.dtype.names)
    if want.dtype.kind in "OTSU":
        return got.dtype.kind in want.dtype.kind + "U" and got.tolist() == want.tolist()
    native = want.dtype.newbyteorder("=")
    if got.dtype.newbyteorder("=") != native: return False
    got, want = got.astype(native), want.astype(native)
    if want.dtype.num > 255 or want.dtype.kind in "mM" or not want.size or not want.itemsize:
        return got.tobytes() == want.tobytes()
    return bool((got == want).all())
