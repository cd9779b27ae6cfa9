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
    "float8 fields": np.dtype(
        [("w", ML["float8_e5m2"], 2), ("v", ML["float8_e4m3fnuz"])]
    ),
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
    """Return rows of a dtype: small numbers that it holds, others on each rank."""
    made = np.zeros(count, dtype)
    if dtype.names is not None:
        for place, name in enumerate(dtype.names):
            part = rows(dtype[name].base, rank + place, made[name].size)
            made[name] = part.reshape(made[name].shape)
        return made
    values = _FEW.get(dtype.name, [1, 0, 3, 2])
    values = [values[(rank + i) % len(values)] for i in range(count)]
    if dtype.kind in "SUTO":
        texts = [f"{value}é"[: 1 if dtype.kind == "S" else 2] for value in values]
        values = [text.encode() for text in texts] if dtype.kind == "S" else texts
    elif dtype.kind in "mM":
        values = np.array(values, "i8").view(made.dtype.newbyteorder("="))
    elif dtype.num == np.dtype("V1").num:
        values = np.arange(rank, rank + made.nbytes, dtype="u1").view(dtype)
        return values if made.nbytes else made
    elif dtype.name.startswith(("complex", "bcomplex")):
        values = [value + 1j for value in values]
    # Not from a list: that of a dtype of ml_dtypes need not be known to NumPy
    is_new = dtype.num > 255 and dtype.kind != "T"
    made[...] = np.array(values).astype(dtype) if is_new else values
    return made


def is_like(got, want):
    """Return whether arrays have one dtype and equal values.

    The order of bytes, the layout of a compound and the width of text may differ.
    """
    if not isinstance(got, np.ndarray) or got.shape != want.shape:
        return False
    if want.dtype.names is not None:
        return got.dtype.names == want.dtype.names and all(
            is_like(got[name], want[name]) for name in want.dtype.names
        )
    if want.dtype.kind in "OTSU":
        return got.dtype.kind in want.dtype.kind + "U" and got.tolist() == want.tolist()
    native = want.dtype.newbyteorder("=")
    if got.dtype.newbyteorder("=") != native:
        return False
    if native.num > 255 or native.kind in "mMV":
        return got.astype(native).tobytes() == want.astype(native).tobytes()
    return bool((got == want).all())
