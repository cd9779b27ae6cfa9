"""Checksums of what is in memory, by which ranks see that they have the same rows.

Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.data.batching import Map
from mpidist.data.map_dataset import SourceMapDataset, walk
from mpidist.data.sources import ArrayRows
from mpidist.device import arrays
from mpidist.errors import MpidistError
from mpidist.util import logs
from mpidist.util.dtypes import is_beyond_exact
from mpidist.util.serialization import hash62

# Checksums of so many bytes take about a second
_WHOLE_BYTES = 2 << 30
_SAMPLED_ROWS, _SAMPLED_BYTES = 4096, 16 << 20
_BLOCK_BYTES = 64 << 20
_MOST_ITEMS = 100_000  # of a list of arrays, whose checksums take about a second
_MOST_NAMED = 100
_HINT = (
    "(if rows were shuffled or split, use a seed that is the same on all ranks; for "
    "rows of each rank's own, distribute_datasets_from_function)"
)
_NUMBERS = (bool, int, float, complex, np.generic)
_VALUES = (*_NUMBERS, str, bytes, os.PathLike, type(None))
# Packages of tables, and the names and columns of one
_TABLES: dict[str, Callable[[Any], Iterable[tuple[Any, Any]]]] = {
    "pandas": lambda table: table.items(),
    "polars": lambda table: zip(table.columns, table.iter_columns(), strict=True),
    "pyarrow": lambda table: zip(table.column_names, table.columns, strict=True),
}


def describe_contents(steps: Any, rank: int) -> tuple[tuple[str, str], ...]:
    """Return the name and the checksum of each array in memory that a dataset reads.

    The checksums are of all bytes, unless these are more than 2 GiB: then of evenly
    spaced rows, which rank 0 logs.

    Args:
      steps: the dataset.
      rank: of this process.
    """
    named_arrays = [
        (f"{name} of dataset {i}" if i else name, array)
        for i, source in enumerate(_sources(steps))
        for name, array in source
    ]
    # The same array may be read through several datasets
    distinct = {id(array): array for _, array in named_arrays}
    size_bytes = sum(array.nbytes for array in distinct.values())
    is_whole = size_bytes <= _WHOLE_BYTES
    if not is_whole and rank == 0:
        logs.info(
            "data",
            f"mpidist: the dataset has {size_bytes / 2**30:.1f} GiB of arrays in "
            f"memory: {_SAMPLED_ROWS:,} rows of each are compared between ranks, not "
            "all",
        )
    sums = {
        key: f"{array.dtype} {array.shape} with checksum {_checksum(array, is_whole)}"
        for key, array in distinct.items()
    }
    named = [(f"{name} {_HINT}", sums[id(array)]) for name, array in named_arrays]
    if rest := named[_MOST_NAMED:]:
        text = repr([text for _, text in rest])
        named[_MOST_NAMED:] = [
            (f"{len(rest):,} more arrays {_HINT}", f"{hash62(text):x}")
        ]
    return tuple(named)


def _sources(steps: Any) -> list[list[tuple[str, Any]]]:
    sources = []
    for step in walk(steps):
        if isinstance(step, SourceMapDataset) and isinstance(step.source, ArrayRows):
            sources.append(step.source.contents())
        if isinstance(step, Map) and step.captured is not None:
            sources.append(list(held_arrays(step.captured, "dataset")))
    return sources


def held_arrays(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and the arrays that an indexable object holds.

    These are arrays, tensors, tables of pandas, Polars and PyArrow, and lists of
    numbers, text and paths in its attributes and items, and in the variables of
    functions that it holds. GPU arrays are copied to the host.
    """
    yield from _held(value, name, {})


def _held(value: Any, name: str, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if id(value) in seen or isinstance(value, type):
        return
    seen[id(value)] = value  # kept, or a later column could have the same id
    array = _array_of(value)
    if array is not None:
        yield name, array
        return
    for inner_name, inner in _parts(value, name):
        yield from _held(inner, inner_name, seen)


def _array_of(value: Any) -> Any:
    """Return arrays, tensors, and lists of values as an array of NumPy; or None."""
    if _package(value) in _TABLES and hasattr(value, "__array__"):
        if hasattr(type(value), "columns"):
            return None  # each column has its own dtype
        array = np.asarray(value)
        has_changed = array.dtype.hasobject or arrays.find_change(value, array)
        # Missing values, and scalars of PyArrow, as text
        items = (str(x) if _package(x) in _TABLES else x for x in value)
        value = list(items) if has_changed else array
    if isinstance(value, np.ndarray):
        if value.dtype != object:
            return np.asarray(value)
        value = value.ravel().tolist()
    if isinstance(value, list | tuple):
        return _list_as_array(value)
    # Parameters belong to a model, which ranks may initialise later
    if not hasattr(value, "__dlpack__") or getattr(value, "requires_grad", False):
        return None
    try:
        return arrays.to_host(arrays.to_array(value))
    except MpidistError:  # such as sparse tensors, which stay uncompared
        return None


def _list_as_array(items: Sequence[Any]) -> Any:
    """Return numbers, text and paths as an array, or None if there are other items.

    The folder that all paths are in is left out: each node may have its own copy.
    """
    kinds = set(map(type, items))
    if not kinds or not all(issubclass(kind, _VALUES) for kind in kinds):
        return None
    if all(issubclass(kind, _NUMBERS) for kind in kinds):
        array = np.asarray(items)
        if not (array.dtype.hasobject or is_beyond_exact(array)):
            return array
    texts = [item if isinstance(item, str) else _text_of(item) for item in items]
    first, last = min(texts), max(texts)
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last))
    folder = 1 + first.rfind(os.sep, 0, sum(1 for _ in equal))
    joined = repr([text[folder:] for text in texts])
    return np.frombuffer(joined.encode("utf-8", "surrogatepass"), np.uint8)


def _package(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _text_of(item: Any) -> str:
    is_path = isinstance(item, os.PathLike)
    return os.fsdecode(item) if is_path else repr(item)


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, np.ndarray):
        value = value.ravel().tolist()
    columns = _TABLES.get(_package(value)) if hasattr(type(value), "columns") else None
    if isinstance(value, dict) or columns:
        items = columns(value) if columns else value.items()
        yield from ((f"{name}[{key!r}]", item) for key, item in items)
    elif isinstance(value, list | tuple):
        yield from _parts_of_list(value, name)
    elif isinstance(value, functools.partial):
        yield from _parts((value.func, *value.args, *value.keywords.values()), name)
    elif isinstance(value, types.MethodType):
        yield name, value.__self__
    elif isinstance(value, types.FunctionType):
        variables = value.__code__.co_freevars
        for variable, cell in zip(variables, value.__closure__ or (), strict=True):
            if cell != types.CellType():  # an empty cell has no contents yet
                yield f"{name}: {variable}", cell.cell_contents
    elif hasattr(type(value), "__getitem__"):
        attributes = getattr(value, "__dict__", {})
        yield from ((f"{name}.{key}", item) for key, item in attributes.items())


def _parts_of_list(items: Sequence[Any], name: str) -> Iterator[tuple[str, Any]]:
    kinds = set(map(type, items))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind in (tuple, list, dict) and len(items) > len(items[0]):
        keys = items[0] if kind is dict else range(len(items[0]))
        if all(len(item) == len(keys) for item in items):
            with contextlib.suppress(KeyError):
                columns = [(key, [item[key] for item in items]) for key in keys]
                yield from ((f"{name}[:][{key!r}]", column) for key, column in columns)
                return
    step = math.ceil(len(items) / _MOST_ITEMS) or 1
    if step > 1:
        logs.info(
            "data",
            f"mpidist: {name} has {len(items):,} items: one of {step} is compared "
            "between ranks, not each",
        )
    yield from ((f"{name}[{i}]", items[i]) for i in range(0, len(items), step))


def _checksum(array: Any, is_whole: bool) -> str:
    array = np.atleast_1d(array)
    if not is_whole:
        row_bytes = max(1, array.nbytes // max(1, len(array)))
        rows = min(_SAMPLED_ROWS, 1 + _SAMPLED_BYTES // row_bytes, len(array))
        array = array[np.linspace(0, len(array) - 1, rows).astype(np.int64)]
    if array.dtype.hasobject:  # text of NumPy 2, whose bytes are elsewhere
        return f"{hash62(repr(array.tolist())):x}"
    # Blocks of rows, because flattening another memory layout would copy the array
    count = max(1, len(array) * _BLOCK_BYTES // max(1, array.nbytes))
    starts = range(0, len(array) if array.nbytes else 0, count)
    sums = [arrays.checksum(array[start : start + count]) for start in starts]
    return sums[0] if len(sums) == 1 else f"{hash62(' '.join(sums)):x}"
