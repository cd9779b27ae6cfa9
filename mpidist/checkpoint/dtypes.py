"""What HDF5 stores for a dtype: the same, or integers and the name of the dtype."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import h5py
import numpy as np

from mpidist.errors import DTypeError

__all__ = ["dtype_text", "is_native", "original_dtype", "stored_as"]

_NUMPY_TEXT = re.compile(r"[<>|=][mMU]\d+(\[\w+\])?")
_ML_TEXT = re.compile(r"bfloat16|float\w+|u?int[1-4]")
Shape = tuple[int, ...]


def is_native(dtype: np.dtype[Any]) -> bool:
    """Return whether HDF5 gives back the same dtype, metadata left out."""
    with contextlib.suppress(TypeError, ValueError, KeyError):
        found = h5py.h5t.py_create(dtype, logical=True).dtype
        return bool(found == dtype) and dtype.itemsize > 0
    return False


def stored_as(
    dtype: np.dtype[Any], shape: Shape, name: str
) -> tuple[np.dtype[Any], Shape]:
    """Return the dtype and the shape by which HDF5 stores an array, byte by byte.

    Raises:
      DTypeError: arrays of such a dtype cannot be stored. `name` is for the message.
    """
    if dtype.hasobject:
        raise DTypeError(
            f"{name} has dtype {dtype}, with Python objects; a checkpoint holds no "
            "pickles, so an array of numbers is needed"
        )
    if dtype.names is None and dtype.kind in "mM":
        return np.dtype("i8").newbyteorder(dtype.byteorder), shape
    if dtype.kind == "U" and dtype.itemsize:
        order = dtype.byteorder
        return np.dtype("u4").newbyteorder(order), (*shape, dtype.itemsize // 4)
    if is_native(dtype):
        return dtype, shape
    if dtype.names is None and dtype.itemsize in (1, 2) and _is_ml(dtype):
        return np.dtype(f"u{dtype.itemsize}"), shape
    raise DTypeError(
        f"{name} has dtype {dtype}, which HDF5 does not have; convert it first"
    )


def dtype_text(dtype: np.dtype[Any]) -> str | None:
    """Return the text from which `original_dtype` makes the dtype; None if native."""
    if dtype.names is None and dtype.kind in "mMU":
        return str(dtype.str)
    return None if is_native(dtype) else str(dtype.name)


def original_dtype(
    text: str, stored: np.dtype[Any], shape: Shape
) -> tuple[np.dtype[Any], Shape]:
    """Return the dtype and shape of an array that was stored as integers.

    Raises:
      ValueError: there is no such dtype, or it does not fit what is stored.
    """
    if _NUMPY_TEXT.fullmatch(text):
        dtype = np.dtype(text)
    elif _ML_TEXT.fullmatch(text):
        dtype = _ml_dtype(text)
    else:
        raise ValueError(f"there is no dtype {text!r}")
    if stored_as(dtype, (), "")[0] != stored:
        raise ValueError(f"dtype {text!r} is not stored as {stored}")
    if dtype.kind != "U":
        return dtype, shape
    if not shape or shape[-1] != dtype.itemsize // 4:
        raise ValueError(f"dtype {text!r} is not stored in shape {shape}")
    return dtype, shape[:-1]


def _is_ml(dtype: np.dtype[Any]) -> bool:
    with contextlib.suppress(ValueError):
        return _ml_dtype(dtype.name) == dtype
    return False


def _ml_dtype(name: str) -> np.dtype[Any]:
    """Return a dtype of the package ml_dtypes, such as bfloat16."""
    try:
        import ml_dtypes
    except ImportError:
        raise ValueError(f"dtype {name!r} needs pip install ml_dtypes") from None
    found = getattr(ml_dtypes, name, None)
    if not isinstance(found, type) or not issubclass(found, np.generic):
        raise ValueError(f"there is no dtype {name!r}")
    return np.dtype(found)
