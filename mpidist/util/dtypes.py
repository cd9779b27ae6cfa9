"""What can be done with each dtype: one table, which everything that asks reads.

`kind` and `char` of a dtype of ml_dtypes may be those of any other: float8_e5m2 says
"f", int1 says "e", which is float16's. So these are asked for NumPy's own dtypes only,
and a dtype of ml_dtypes is known by name. A compound is what its fields are. Dtypes of
other packages are unknown: their bytes may mean anything.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

from mpidist.errors import DTypeError

_FLOAT32 = np.dtype(np.float32)
_NATIVE_NUMBERS = range(24)  # `num` of NumPy's own dtypes


class Traits(NamedTuple):
    """What can be done with the values of a dtype.

    Args:
      family: "bool", "integer", "float", "complex", "date", "duration", "bytes", "text"
        (of fixed width), "string" (of any), "raw", "fields", "object" or "unknown".
      is_summed: whether they can be summed.
      wide: in which they are summed; None for their own dtype.
      stored: of the integers that hold their bytes in HDF5; "" if HDF5 has them itself.
      is_native: whether the dtype is NumPy's own.
      is_narrowed: whether compression sends them as 16-bit floats.
      is_on_gpu: whether CuPy has them.
      is_sent: whether their bytes mean the same in another process.
    """

    family: str
    is_summed: bool = False
    wide: np.dtype[Any] | None = None
    stored: str = ""
    is_native: bool = True
    is_narrowed: bool = False
    is_on_gpu: bool = False
    is_sent: bool = True


_INTEGER = Traits("integer", is_summed=True, is_on_gpu=True)
_FLOAT = Traits("float", is_summed=True, is_narrowed=True, is_on_gpu=True)
_COMPLEX = Traits("complex", is_summed=True, is_on_gpu=True)
# Of NumPy, by `char`; int8 "b" to uint64 "Q", float32 "f" to complex256 "G"
_NATIVE = {
    "?": Traits("bool", is_on_gpu=True),
    **dict.fromkeys("bhilqpBHILQP", _INTEGER),
    "e": Traits("float", is_summed=True, wide=_FLOAT32, is_on_gpu=True),
    **dict.fromkeys("fd", _FLOAT),
    "g": _FLOAT._replace(is_on_gpu=False),
    **dict.fromkeys("FD", _COMPLEX),
    "G": _COMPLEX._replace(is_on_gpu=False),
    "M": Traits("date", stored="i8"),
    "m": Traits("duration", stored="i8"),
    "S": Traits("bytes"),
    "U": Traits("text", stored="u4"),
    "V": Traits("raw"),
    "O": Traits("object", is_sent=False),
}
_STRING = Traits("string", is_sent=False)  # "T", whose text is elsewhere
_UNKNOWN = Traits("unknown", is_native=False, is_sent=False)
_BYTE = Traits("integer", stored="u1", is_native=False)
_FLOAT8 = _BYTE._replace(family="float")
_COMPLEX32 = Traits("complex", stored="u4", is_native=False)
# Of ml_dtypes, by name
_FOREIGN = {
    "bfloat16": Traits("float", True, _FLOAT32, "u2", False, is_on_gpu=True),
    **dict.fromkeys(("int1", "int2", "int4", "uint1", "uint2", "uint4"), _BYTE),
    **dict.fromkeys(("float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"), _FLOAT8),
    **dict.fromkeys(("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz"), _FLOAT8),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"), _FLOAT8),
    **dict.fromkeys(("float8_e5m2fnuz", "float8_e8m0fnu"), _FLOAT8),
    **dict.fromkeys(("complex32", "bcomplex32"), _COMPLEX32),
}


@functools.lru_cache(maxsize=1024)
def traits(dtype: np.dtype[Any]) -> Traits:
    """Return what can be done with values of `dtype`."""
    if dtype.subdtype is not None:
        return traits(dtype.base)
    if dtype.names is not None:
        fields = [traits(dtype[name]) for name in dtype.names]
        is_native = all(field.is_native for field in fields)
        is_sent = all(field.is_sent for field in fields)
        return Traits("fields", is_native=is_native, is_sent=is_sent)
    if dtype.num in _NATIVE_NUMBERS:
        return _NATIVE[dtype.char]
    if dtype.char == "T" and dtype.type is str:
        return _STRING
    is_known = dtype.name in _FOREIGN and dtype.type.__module__ == "ml_dtypes"
    return _FOREIGN[dtype.name] if is_known else _UNKNOWN


# Cached, too: a call that is found there costs as much as `dtype.kind in "iu"`


@functools.lru_cache(maxsize=1024)
def is_integer(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is an integer of NumPy, whose sums may overflow."""
    found = traits(dtype)
    return found.family == "integer" and found.is_native


@functools.lru_cache(maxsize=1024)
def is_floating(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is floating or complex, and is computed with.

    So is bfloat16; floats of 8 and fewer bits are for storage.
    """
    found = traits(dtype)
    return found.is_summed and found.family in ("float", "complex")


@functools.lru_cache(maxsize=1024)
def is_float16(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is float16 or bfloat16, whose sums are wider."""
    return traits(dtype).wide is not None


def is_real(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is of real numbers, or bool, that are computed with."""
    found = traits(dtype)
    return found.family == "bool" or (found.is_summed and found.family != "complex")


def is_text(dtype: np.dtype[Any]) -> bool:
    """Return whether `dtype` is of text or bytes of fixed width: it drops NULs."""
    return traits(dtype).family in ("text", "bytes")


def accumulator_dtype(dtype: np.dtype[Any], name: str = "value") -> np.dtype[Any]:
    """Return the dtype in which values of `dtype` are summed.

    Raises:
      DTypeError: values of `dtype` cannot be summed.
    """
    found = traits(dtype)
    if not found.is_summed:
        raise DTypeError(
            f"{name} has dtype {dtype}, which cannot be summed or averaged; "
            "cast it to an integer or a floating dtype first"
        )
    return found.wide or dtype


def mean_dtype(dtype: np.dtype[Any], name: str = "value") -> np.dtype[Any]:
    """Return the dtype of a mean of values of `dtype`: float64 for integers."""
    accumulator_dtype(dtype, name)
    return dtype if is_floating(dtype) else np.dtype(np.float64)


def require_range(array: Any, dtype: np.dtype[Any], name: str) -> None:
    """Raise a DTypeError if a cast to an integer `dtype` would wrap around."""
    source, target = traits(array.dtype), traits(dtype)
    if target.family != "integer" or source.family not in ("integer", "float"):
        return
    if not array.size or np.can_cast(array.dtype, dtype):
        return
    wide: Any = array if source.is_native else array.astype(np.float64)
    iinfo: Any = np.iinfo if target.is_native else _ml_dtypes().iinfo
    limits, least, most = iinfo(dtype), wide.min(), wide.max()
    if not (least >= limits.min and most <= limits.max):  # also true for NaN
        raise DTypeError(
            f"{name} is {least}..{most}, which does not fit {dtype.name} "
            f"({limits.min}..{limits.max})"
        )


def digits(dtype: np.dtype[Any]) -> int:
    """Return the bits of the integers that a float holds exactly; 0 if it is none."""
    found = traits(dtype)
    if found.family not in ("float", "complex"):
        return 0
    finfo: Any = np.finfo if found.is_native else _ml_dtypes().finfo
    return int(finfo(dtype).nmant) + 1


def is_beyond_exact(array: Any, dtype: Any = None) -> bool:
    """Return whether numbers are so large that floats may not hold integers exactly.

    Args:
      array: of numbers.
      dtype: of the floats, by default that of the array.
    """
    bits = digits(array.dtype if dtype is None else dtype)
    if not bits or not traits(array.dtype).is_summed:
        return False
    with np.errstate(all="ignore"):
        return bool((np.abs(array) >= 2.0**bits).any())


def require_sent(dtype: np.dtype[Any], name: str) -> None:
    """Raise a DTypeError if the bytes of an array are no values in another process."""
    if traits(dtype).is_sent:
        return
    what = "of a package that mpidist does not know"
    if dtype.hasobject:
        what = "with Python objects"
    raise DTypeError(f"{name} has dtype {dtype}, {what}; an array of numbers is needed")


def text_of(dtype: np.dtype[Any]) -> Any:
    """Return a JSON-compatible description of a dtype, for `dtype_of`."""
    if dtype.subdtype is not None:
        return [text_of(dtype.base), dtype.shape]
    if dtype.names is None:
        return dtype.str if traits(dtype).is_native else dtype.name
    by_name: Any = dtype.fields
    fields = [by_name[name] for name in dtype.names]
    return {
        "names": dtype.names,
        "formats": [text_of(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "titles": [field[2] if len(field) > 2 else None for field in fields],
        "itemsize": dtype.itemsize,
        "aligned": dtype.isalignedstruct,
    }


def dtype_of(text: Any) -> np.dtype[Any]:
    """Return the dtype of a description by `text_of`, or of its name."""
    if isinstance(text, str):
        return foreign(text) if text in _FOREIGN else np.dtype(text)
    if isinstance(text, dict):
        text = {**text, "formats": list(map(dtype_of, text["formats"]))}
    else:
        text = dtype_of(text[0]), tuple(text[1])
    dtype: np.dtype[Any] = np.dtype(text)
    return dtype


def foreign(name: str) -> np.dtype[Any]:
    """Return the dtype of ml_dtypes of this name.

    Raises:
      ValueError: there is none, or not in the version that is installed.
    """
    if name not in _FOREIGN:
        raise ValueError(f"there is no dtype {name!r}")
    try:
        dtype: np.dtype[Any] = np.dtype(getattr(_ml_dtypes(), name))
        return dtype
    except (ImportError, AttributeError):
        raise ValueError(f"dtype {name!r} needs a newer ml_dtypes") from None


def _ml_dtypes() -> Any:
    return importlib.import_module("ml_dtypes")
