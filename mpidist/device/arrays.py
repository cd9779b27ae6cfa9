"""Convert arrays of NumPy, CuPy and other libraries, and convert results back.

Communication and arithmetic work on NumPy arrays (CuPy arrays on a GPU replica).
`to_array` converts a user's value, without a copy where its memory layout allows that;
`like` converts a result to the type that the user passed.
"""

from __future__ import annotations

import functools
import re
import sys
from typing import Any

import numpy as np

from mpidist.device.binding import on_gpu
from mpidist.errors import ArgumentTypeError, DTypeError
from mpidist.util import validation
from mpidist.util.dtypes import is_beyond_exact, is_text, require_sent, traits
from mpidist.values import ArrayView, DistributedValues, local_component

_PYTHON_NUMBERS = (bool, int, float, complex)
_NUMBERS = {*_PYTHON_NUMBERS, np.float64, np.float32, np.int64, np.int32, np.bool_}
# Other subclasses add something that an array lacks: a mask, a unit, another `*`
_PLAIN = {np.ndarray, np.memmap, np.recarray, *_NUMBERS}
_LONG_DOUBLES = np.longdouble, np.clongdouble
# How libraries call dtypes of floats: Float64, double[pyarrow], halffloat
_FLOATS = re.compile(r"(?!.*int)(.*float|double|complex)", re.I)
_FETCHED_BYTES = 16 << 20  # copied from a GPU at a time
_SUMMED_BYTES = 256 << 10
_DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def to_array(value: Any, name: str = "value") -> Any:
    """Return `value` as a NumPy or CuPy array in native byte order.

    Takes arrays, array scalars, Python numbers, variables, mirrored values, and any
    object with `__array_interface__`, `__dlpack__`, `__cuda_array_interface__` or a
    buffer. An array on a GPU becomes a CuPy array there.

    Args:
      value: the array or number.
      name: what error messages call it.

    Raises:
      ArgumentTypeError: the type is not supported, or has a mask or a unit, which
        arrays lack; or the array is on a GPU and CuPy is not installed.
      DTypeError: it holds Python objects, an integer of more than 64 bits, or a dtype
        of an unknown package.
    """
    if type(value) is np.ndarray:
        array = value
    elif isinstance(value, ArrayView | DistributedValues):
        array = local_component(value)
        array = array._array() if isinstance(array, ArrayView) else array
        array = to_array(array, name)
    elif meaning := find_meaning(value):
        raise ArgumentTypeError(f"{name} {meaning}")
    elif isinstance(value, (np.ndarray, np.generic, *_PYTHON_NUMBERS)):
        array = np.asarray(value)
        if isinstance(value, int) and array.dtype.hasobject:
            raise DTypeError(f"{name} is {validation.shown(value)}: more than 64 bits")
    elif is_device_array(value):
        return value
    elif hasattr(value, "resolve_neg"):
        array = _from_torch(value, name)
        if is_device_array(array):
            return array
    elif is_jax_array(value) and _require_readable(value, name) == "cpu":
        array = np.asarray(value)  # a read-only view: JAX arrays are immutable
    elif _is_on_gpu(value):
        return _to_cupy(value, name)
    elif hasattr(value, "__dlpack__"):
        array = _from_dlpack(value, name)
    elif hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        array = from_wrapper(value, name)
    elif isinstance(value, bytearray | memoryview) or _has_buffer(value):
        array = np.asarray(memoryview(value))
    else:
        raise ArgumentTypeError(
            f"{name} must be an array or a number, not {validation.shown(value)} "
            f"({type(value).__module__}.{type(value).__qualname__})"
        )
    require_sent(array.dtype, name)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return array


def to_tensor(value: Any, name: str = "value") -> Any:
    """Return `value` as `to_array` does, but also accept lists of numbers."""
    if isinstance(value, list):
        require_plain(value, name)
        value = np.asarray(value)
    return to_array(value, name)


def require_plain(value: Any, name: str) -> None:
    """Raise an ArgumentTypeError if an array of `value` would lose what it means."""
    if meaning := find_meaning(value):
        raise ArgumentTypeError(f"{name} {meaning}")


def find_meaning(value: Any) -> str:
    """Return what `np.asarray(value)` would lose, a mask or a unit; "" for nothing.

    Args:
      value: an object of any type; a list or tuple for its items.
    """
    kind = type(value)
    if kind in _PLAIN:
        return ""
    if kind in (list, tuple):
        return next(filter(None, map(_meaning_of_item, _tell_apart(value))), "")
    if isinstance(value, np.ma.MaskedArray):
        return "is a masked array, whose mask would be lost; fill it first"
    has_more = isinstance(value, np.ndarray) or _has_unit(value)
    if not has_more or kind.__module__.startswith("mpidist."):
        return ""
    return (
        f"is a {kind.__module__}.{kind.__qualname__}, not a plain array; what it adds "
        "to one, such as a unit, would be lost: convert it with np.asarray()"
    )


def _tell_apart(items: Any) -> list[Any]:
    """Return the items that may have a meaning; one of each type is enough."""
    kinds = set(map(type, items)) - _NUMBERS
    if not kinds:
        return []
    if kinds & {list, tuple}:
        return [item for item in items if type(item) not in _NUMBERS]
    return [next(item for item in items if type(item) is kind) for kind in kinds]


def _meaning_of_item(item: Any) -> str:
    meaning = find_meaning(item)
    if meaning or not _is_wrapper(item):
        return meaning
    return find_meaning(np.asanyarray(item))


def _has_unit(value: Any) -> bool:
    if not _is_wrapper(value):
        return False
    kind = type(value)
    # Of classes: attributes of a frame or a series may be its columns or rows
    if hasattr(kind, "units") or hasattr(type(getattr(value, "dtype", 0)), "units"):
        return True
    if hasattr(kind, "unit") and kind.__module__.partition(".")[0] != "pandas":
        return True  # that of pandas' dates is a part of their dtype
    inner = value.data if hasattr(kind, "data") else value  # as in xarray
    return inner is not value and hasattr(type(inner), "units")


def _is_wrapper(value: Any) -> bool:
    """Return whether a value is of no library of arrays, but becomes an array."""
    kind = type(value)
    is_array = hasattr(kind, "__array__") and not hasattr(kind, "__dlpack__")
    return is_array and not isinstance(value, np.generic)


def from_wrapper(value: Any, name: str) -> Any:
    """Return the array of an object with `__array__`, such as a column.

    Raises:
      ArgumentTypeError: the array has a mask or a unit.
      DTypeError: see `find_change`.
    """
    array = np.asanyarray(value)  # netCDF4's variables return masked arrays
    require_plain(array, name)
    array = np.asarray(array)
    if change := "" if array.dtype.hasobject else find_change(value, array):
        raise DTypeError(f"{name} {change}")
    return array


def like(result: Any, original: Any) -> Any:
    """Convert the array `result` to the type of `original`.

    A Python number gives a Python number, an array scalar an array scalar, an array of
    another library an array of that library. Anything else gives `result` itself.
    """
    if type(original) is np.ndarray or type(original) is type(result):
        return result
    if isinstance(original, np.generic):
        return result[()]
    if isinstance(original, _PYTHON_NUMBERS):
        return result.item() if result.ndim == 0 else result
    if isinstance(original, np.ndarray | ArrayView) or is_device_array(original):
        return result
    if not hasattr(original, "__dlpack__"):
        return _to_numba(result, original)
    if not is_device_array(result):  # possibly an array scalar
        result = np.asarray(result)
        if is_jax_array(original):
            return _to_jax(result)
    return _to_library(result, _library_of(original))


def like_foreign(result: Any, original: Any) -> Any:
    """Do what `like` does if `original` is another library's array, else nothing."""
    is_own = isinstance(original, np.ndarray | np.generic) or is_device_array(original)
    if is_own or not hasattr(original, "__dlpack__"):
        return result
    return like(result, original)


def _library_of(array: Any) -> Any:
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return sys.modules.get(type(array).__module__.partition(".")[0])


def _to_numba(result: Any, original: Any) -> Any:
    if type(original).__module__.startswith("numba.") and is_device_array(result):
        return sys.modules["numba"].cuda.as_cuda_array(result)
    return result


def _to_library(array: Any, library: Any) -> Any:
    """Convert `array` to another library's type, if that library supports DLPack."""
    if not hasattr(library, "from_dlpack"):
        return array
    flat = array.reshape(-1)
    if array.dtype.name == "bfloat16":  # NumPy's DLPack export does not know it
        foreign = library.from_dlpack(flat.view(np.int16)).view(library.bfloat16)
    else:
        foreign = library.from_dlpack(flat)
    return foreign.reshape(array.shape)


def namespace(array: Any) -> Any:
    """Return the module, numpy or cupy, whose functions work on `array`."""
    return sys.modules["cupy"] if is_device_array(array) else np


def is_device_array(value: Any) -> bool:
    """Return whether `value` is a CuPy array."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def is_jax_array(value: Any) -> bool:
    """Return whether `value` is a JAX array or a JAX tracer."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(value, getattr(jax, "Array", ()))


def refuse_keys(array: Any, name: str) -> None:
    """Raise if a JAX array or tracer holds random keys.

    Raises:
      DTypeError: it does.
    """
    jax = sys.modules["jax"]
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
        raise DTypeError(
            f"{name} has dtype {array.dtype}, of JAX's random keys; use "
            "jax.random.key_data and jax.random.wrap_key_data"
        )


def _require_readable(array: Any, name: str) -> str:
    """Return the platform, such as "cpu", of a JAX array on one device.

    Raises:
      ArgumentTypeError: it is a tracer, was deleted, or lies on several devices.
      DTypeError: it holds JAX's random keys.
    """
    jax = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        raise ArgumentTypeError(
            f"{name} has no value yet: JAX is tracing it ({array.aval.str_short()}), "
            "for jit, grad or vmap; in there, use the collectives of mpidist.jax"
        )
    if array.is_deleted():
        raise ArgumentTypeError(
            f"{name}, a JAX array, was deleted: its memory was donated to a computation"
        )
    refuse_keys(array, name)
    devices = array.devices()
    if len(devices) > 1:
        raise ArgumentTypeError(
            f"{name}, a JAX array, is on {len(devices)} devices of this process, but a "
            "replica has one"
        )
    (device,) = devices
    return str(device.platform)


def _to_jax(array: Any) -> Any:
    """Convert a NumPy array to a JAX array, without a copy where JAX supports that."""
    numpy = sys.modules["jax"].numpy
    # DLPack supports NumPy's own dtypes except long double
    found = traits(array.dtype)
    if (
        found.is_native
        and found.is_on_gpu
        and array.flags.c_contiguous
        and array.flags.writeable
    ):
        return numpy.from_dlpack(array)
    return numpy.array(array, copy=True)


def _is_on_gpu(value: Any) -> bool:
    if hasattr(value, "__dlpack_device__"):
        return value.__dlpack_device__()[0] in _DLPACK_CUDA
    # PyTorch tensors have this attribute only if they are on a GPU
    return hasattr(value, "__cuda_array_interface__")


def _to_cupy(value: Any, name: str) -> Any:
    """Convert another library's array on a GPU to a CuPy array, without a copy.

    Work that is queued on the current stream afterwards waits for the other library's
    work on the array (both protocols synchronise streams).
    """
    try:
        import cupy
    except ImportError:
        raise ArgumentTypeError(
            f"{name} is on a GPU, which needs CuPy: pip install cupy-cuda12x or "
            "cupy-cuda13x"
        ) from None
    try:
        has_dlpack = hasattr(value, "__dlpack__")
        return cupy.from_dlpack(value) if has_dlpack else cupy.asarray(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise _copy_needed(value, name, error) from error


def _from_dlpack(value: Any, name: str) -> Any:
    try:
        return np.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise _copy_needed(value, name, error) from error


def is_lazy(value: Any) -> bool:
    """Return whether `to_array` copies a PyTorch tensor: see `_from_torch`."""
    return hasattr(value, "resolve_neg") and bool(value.is_neg() or value.is_conj())


def find_change(value: Any, array: Any) -> str:
    """Return how `array = np.asarray(value)` differs from a column; "" if it does not.

    Missing values make floats of the integers of pandas, Polars and PyArrow, and arrays
    of text drop NULs at the end.

    Args:
      value: an object of another library, or a data frame.
      array: without Python objects.
    """
    declared = ", ".join(sorted(set(declared_dtypes(value))))
    if declared and is_text(array.dtype):
        texts = np.asarray(value, object).ravel().tolist()
        if any(text[-1:] in ("\0", b"\0") for text in texts):
            return "has text with NULs at the end, which arrays drop"
    columns = value.columns if hasattr(type(value), "columns") else [value]
    if (nulls := sum(map(_null_count, columns))) > 0:
        # PyArrow gives nulls of dictionaries the value of others
        can_mark = traits(array.dtype).family in (
            "float",
            "complex",
            "date",
            "duration",
        )
        if not can_mark or np.count_nonzero(np.isnan(array)) < nulls:
            return f"has missing values, which {array.dtype} does not hold; fill them"
    if not declared or _FLOATS.match(declared) or not is_beyond_exact(array):
        return ""
    return (
        f"has dtype {declared} and missing or other values, so that large integers "
        f"would be rounded to {array.dtype}; fill or drop them, as fillna(-1) does"
    )


def _null_count(column: Any) -> int:
    count = getattr(column, "null_count", 0)
    return count if isinstance(count, int) else 0


def declared_dtypes(value: Any) -> list[str]:
    """Return the dtypes of a data frame's columns, or a column's if not NumPy's."""
    kind = type(value)  # attributes of a frame may be its columns
    for name in "dtype", "type":
        if hasattr(kind, name):
            dtype = getattr(value, name)
            return [] if isinstance(dtype, np.dtype) else [str(dtype)]
    if hasattr(kind, "dtypes"):
        return list(map(str, value.dtypes))
    return list(map(str, value.schema.types)) if hasattr(kind, "schema") else []


def _from_torch(tensor: Any, name: str) -> Any:
    """Convert a PyTorch tensor, without a copy unless its memory holds other numbers.

    That of `z.conj()` or `z.conj().imag` does: PyTorch keeps a bit in their place,
    which NumPy, CuPy and DLPack do not know.
    """
    torch, convert = sys.modules["torch"], _from_dlpack
    if _is_on_gpu(tensor):
        convert = _to_cupy
    try:
        tensor = tensor.resolve_conj().resolve_neg()
        is_bfloat16 = tensor.dtype is torch.bfloat16  # DLPack of NumPy lacks it
        bits = tensor.view(torch.int16) if is_bfloat16 else tensor
    except RuntimeError as error:
        raise _copy_needed(tensor, name, error) from error
    array = convert(bits, name)
    if is_bfloat16:
        import ml_dtypes

        array = array.view(ml_dtypes.bfloat16)
    return array


def _copy_needed(value: Any, name: str, error: Exception) -> ArgumentTypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ArgumentTypeError(
        f"{name}, a {kind}, cannot be taken without a copy: {error}"
    )


def _has_buffer(value: Any) -> bool:
    if isinstance(value, bytes | str):
        return False
    try:
        memoryview(value).release()
    except TypeError:
        return False
    return True


def current_gpu() -> int:
    """Return the CUDA device index of this thread's current GPU."""
    return int(sys.modules["cupy"].cuda.runtime.getDevice())


def to_host(array: Any) -> Any:
    """Return `array` as a NumPy array; a CuPy array is copied, in stream order."""
    return array.get() if is_device_array(array) else array


def synchronize(array: Any) -> None:
    """If `array` is on a GPU, wait for all work queued on the current stream."""
    if is_device_array(array):
        import cupy

        cupy.cuda.get_current_stream().synchronize()


def fits_device(array: Any) -> bool:
    """Return whether CuPy supports the array's dtype: numbers and booleans."""
    return traits(array.dtype).is_on_gpu


def to_device(array: Any, device: str) -> Any:
    """Copy the NumPy `array` to `device`; return it unchanged if that is a CPU."""
    if device.startswith("CPU") or not fits_device(array):
        return array
    import cupy

    # The current device is per thread, and the prefetch thread calls this, too
    with on_gpu(int(device.partition(":")[2])):
        return cupy.asarray(array)


def to_device_like(array: Any, original: Any) -> Any:
    """Copy the NumPy `array` to the GPU of `original`, if `original` is on one."""
    return namespace(original).asarray(array) if is_device_array(original) else array


def value_bytes(array: Any) -> Any:
    """Return an array's bytes without padding, in the shape `(elements, bytes)`.

    Long doubles and aligned compound types have padding bytes. Their contents are
    undefined, so two equal arrays may differ there.

    Args:
      array: a NumPy or CuPy array; copied unless it is contiguous without padding.
    """
    flat = np.ascontiguousarray(to_host(array)).reshape(-1)
    rows = flat.view(np.uint8).reshape(flat.size, flat.dtype.itemsize)
    mask = _value_mask(flat.dtype)
    return rows if mask is None else rows[:, mask]


def checksum(array: Any) -> str:
    """Return a checksum of all of an array's bytes, without padding.

    Two sums, CRC-32 and Adler-32: a collision of one of them could go unnoticed. Equal
    for equal bytes in any memory layout, on the host or a GPU.

    Args:
      array: a NumPy or CuPy array.
    """
    import deflate  # not above: the doctor runs without it

    flat = array.reshape(-1)
    # Piece by piece: the second sum reads from the CPU's cache, and a GPU's array needs
    # little memory on the host.
    piece_bytes = _FETCHED_BYTES if is_device_array(array) else _SUMMED_BYTES
    count = max(1, piece_bytes // max(1, flat.dtype.itemsize))
    crc32, adler32 = 0, 1
    for start in range(0, flat.size, count):
        data = value_bytes(flat[start : start + count]).reshape(-1)
        crc32 = deflate.crc32(data, crc32)
        adler32 = deflate.adler32(data, adler32)
    return f"{crc32:08x}{adler32:08x}"


@functools.lru_cache(maxsize=256)
def _value_mask(dtype: np.dtype[Any]) -> Any:
    """Return a mask of the bytes of an element that are not padding; None if all."""
    mask = np.array(_list_value_bytes(dtype), bool)
    return None if mask.all() else mask


def _list_value_bytes(dtype: np.dtype[Any]) -> list[bool]:
    """Return, for each byte of an element, whether it belongs to the value."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return _list_value_bytes(base) * int(np.prod(shape))
    if dtype.fields is not None:
        is_value = [False] * dtype.itemsize
        for field, start, *_ in dtype.fields.values():
            is_value[start : start + field.itemsize] = _list_value_bytes(field)
        return is_value
    # x86's extended precision: 10 bytes, stored in 12 or 16
    if dtype.type in _LONG_DOUBLES and np.finfo(dtype).nmant == 63:
        is_complex = traits(dtype).family == "complex"
        number_bytes = dtype.itemsize // (2 if is_complex else 1)
        number = [i < 10 for i in range(number_bytes)]
        number = number if dtype.isnative else number[::-1]
        return number * (dtype.itemsize // number_bytes)
    return [True] * dtype.itemsize
