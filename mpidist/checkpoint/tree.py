"""State as a tree: groups of named nodes, and arrays as leaves.

::

    Python                       node
    dict                         Group "dict", or "dict of int" if the keys are integers
    list, tuple                  Group "list", "tuple"; the names are 0, 1, ...
    OrderedDict, deque, ...      the same, with a ContainerType
    None, bool, int, float, ...  Leaf of that kind; large integers and text are bytes
    NumPy's scalars              Leaf "array scalar"
    arrays                       Leaf "array"

Nothing here communicates, and nothing is a file yet.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import h5py
import numpy as np

from mpidist.device import arrays
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    DTypeError,
    MpidistError,
)
from mpidist.util.validation import shown
from mpidist.values import Mirrored

__all__ = [
    "ContainerType",
    "DEEPEST",
    "FACTORIES",
    "FAMILIES",
    "Group",
    "Leaf",
    "Link",
    "Node",
    "Path",
    "Piece",
    "SCALARS",
    "STORED_AS_TEXT",
    "TEXTS",
    "as_name",
    "child_names",
    "container_type",
    "dtype_text",
    "encode",
    "escape",
    "is_container",
    "leaf_of_array",
    "is_native",
    "leaves",
    "nodes_below",
    "original_dtype",
    "readable",
    "replace_nodes",
    "require_depth",
    "stored_as",
    "tree_of_nodes",
    "unescape",
]


STORED_AS_TEXT = ("str", "np.str_", "int")  # HDF5's; integers, if they are large
TEXTS = ("str", "bytes", "np.str_", "np.bytes_")
SCALARS = ("None", "bool", "int", "float", "complex", *TEXTS, "array scalar")
_NUMBERS = {"bool": np.bool_, "float": np.float64, "complex": np.complex128}
DEEPEST = 60


@dataclasses.dataclass(frozen=True)
class Piece:
    """Some bytes of an array, and where they are.

    Args:
      file: its name; the files of a checkpoint are in one folder.
      start: their place in the array.
      offset: their place in the file.
      checks: the lengths of blocks that follow each other, and their CRC-32.
    """

    file: str
    start: int
    offset: int
    checks: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return sum(size for size, _ in self.checks)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array, or what is stored like one.

    Args:
      kind: "array", or one of `SCALARS`.
      dtype, shape: of the array; those of its bytes for text.
      array: of NumPy or CuPy; None where it is in `pieces`, or is empty.
      pieces: where it lies, if that is not here.
      role: "variable", or nothing.
      is_frozen: whether nobody changes `array` in place.
    """

    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    array: Any = dataclasses.field(default=None, compare=False)
    pieces: tuple[Piece, ...] = ()
    role: str = ""
    is_frozen: bool = False

    @property
    def size_bytes(self) -> int:
        """The size of the array."""
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Link:
    """A node that is in a shard, under the same name."""

    file: str


class ContainerType(NamedTuple):
    """The type of a container that is no plain dict, list or tuple.

    Args:
      name: one of `FAMILIES`.
      details: the keys of an OrderedDict as names, in order; the name of the factory of
        a defaultdict, if it is a built-in one; the length of a deque, if it has a
        limit; the name of the class of a namedtuple, and of its fields.
    """

    name: str
    details: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """Named nodes.

    Args:
      kind: "dict", "dict of int", "list", "tuple", or "ranks" of a state that each rank
        has for itself.
      children: by escaped name.
      role: "object" and "generator" for their states, or nothing.
      type: of a container that is more than its kind.
    """

    kind: str
    children: dict[str, Node]
    role: str = ""
    type: ContainerType | None = None


Node = Leaf | Group

FAMILIES: dict[str, str] = {  # the kinds of their groups
    "OrderedDict": "dict",
    "defaultdict": "dict",
    "Counter": "dict",
    "deque": "list",
    "namedtuple": "tuple",
}
FACTORIES: dict[str, Callable[[], Any]] = {
    cls.__name__: cls for cls in (bool, int, float, complex, str, bytes, list, dict)
}


def is_container(value: Any) -> bool:
    """Return whether `value` is structure, by tf.nest's rules."""
    return isinstance(value, Mapping | list | tuple | collections.deque)


def child_names(container: Any, path: Path) -> dict[str, Any]:
    """Return the children of a dict, list, tuple or deque by escaped name, sorted.

    Raises:
      ArgumentTypeError: a key that is no str or int.
      ArgumentError: strings and integers as keys of one dict.
    """
    if not isinstance(container, Mapping):
        return {str(i): child for i, child in enumerate(container)}
    if len({type(key) for key in container}) > 1:
        raise ArgumentError(
            f"{readable(path)}: the keys of a dict must be all str or all int, not "
            f"{list(container)[:8]}"
        )
    named = {as_name(key, path): child for key, child in container.items()}
    return dict(sorted(named.items()))


def group_kind(container: Any) -> str:
    """Return the kind of the group that a container becomes."""
    if isinstance(container, Mapping):
        is_int = bool(container) and type(next(iter(container))) is int
        return "dict of int" if is_int else "dict"
    return "tuple" if isinstance(container, tuple) else "list"


def container_type(container: Any, path: Path) -> ContainerType | None:
    """Return what a container is besides a dict, list or tuple; None if nothing.

    Of subclasses only those of the standard library are known, and namedtuples.
    """
    if isinstance(container, tuple):
        fields = getattr(container, "_fields", None)
        names = (type(container).__name__, *(fields or ()))
        return None if fields is None else ContainerType("namedtuple", names)
    if type(container) is collections.deque:
        limit = () if container.maxlen is None else (str(container.maxlen),)
        return ContainerType("deque", limit)
    if type(container) is collections.OrderedDict:
        keys = tuple(as_name(key, path) for key in container)
        return ContainerType("OrderedDict", keys)
    if type(container) is collections.defaultdict:
        known = [n for n, f in FACTORIES.items() if f is container.default_factory]
        return ContainerType("defaultdict", tuple(known))
    is_counter = type(container) is collections.Counter
    return ContainerType("Counter") if is_counter else None


def require_depth(path: Path) -> None:
    """Raise an ArgumentError where structures are too deep, or hold themselves."""
    if len(path) > DEEPEST:
        raise ArgumentError(
            f"{readable(path[:4])}... has more than {DEEPEST} levels; does it hold "
            "itself?"
        )


def encode(value: Any, path: Path) -> Node:
    """Return the node of a nest of arrays, numbers and text.

    Raises:
      ArgumentTypeError: it holds anything else. (DTypeError: a dtype.)
      ArgumentError: keys, names or depths that cannot be stored.
    """
    require_depth(path)
    if not is_container(value):
        return _encode_leaf(value, path)
    children = {
        name: encode(child, (*path, name))
        for name, child in child_names(value, path).items()
    }
    return Group(group_kind(value), children, type=container_type(value, path))


def _encode_leaf(value: Any, path: Path) -> Leaf:
    if value is None:
        return Leaf("None", np.dtype(np.uint8), (0,))
    kind = type(value).__name__
    if type(value) is int:
        return _encode_int(value)
    if type(value) in (str, np.str_):
        kind = "str" if type(value) is str else "np.str_"
        return _bytes_leaf(kind, value.encode("utf-8", "surrogatepass"))
    if type(value) in (bytes, np.bytes_):
        return _bytes_leaf("bytes" if type(value) is bytes else "np.bytes_", value)
    if type(value) in (bool, float, complex):
        return _array_leaf(kind, np.asarray(value, _NUMBERS[kind]))
    if isinstance(value, np.generic):
        stored_as(value.dtype, (), readable(path))
        return _array_leaf("array scalar", np.asarray(value))
    return leaf_of_array(value, path)


def leaf_of_array(value: Any, path: Path) -> Leaf:
    """Return the leaf of an array of any library, without a copy."""
    if isinstance(value, bool | int | float | complex | str | bytes | np.void):
        raise _unknown(value, path)  # subclasses, such as enumerations
    try:
        mine = value.values[0] if isinstance(value, Mirrored) else value
        is_plain = isinstance(mine, np.ndarray) and type(mine) is not np.ma.MaskedArray
        array = np.asarray(mine) if is_plain else arrays.to_array(mine, readable(path))
    except MpidistError as error:
        if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
            raise
        raise _unknown(value, path) from error
    stored_as(array.dtype, array.shape, readable(path))
    return _array_leaf("array", array)


def _unknown(value: Any, path: Path) -> ArgumentTypeError:
    cls = type(value)
    return ArgumentTypeError(
        f"{readable(path)} is a {cls.__module__}.{cls.__qualname__}, which cannot be "
        "saved; give the class methods get_state() and set_state(state), or pass its "
        "variables, arrays and numbers"
    )


def _array_leaf(kind: str, array: Any) -> Leaf:
    return Leaf(kind, array.dtype, tuple(array.shape), array)


def _bytes_leaf(kind: str, data: bytes) -> Leaf:
    return _array_leaf(kind, np.frombuffer(data, np.uint8))


def _encode_int(value: int) -> Leaf:
    if -(1 << 63) <= value < 1 << 63:
        return _array_leaf("int", np.asarray(value, np.int64))
    return _bytes_leaf("int", f"{value:#x}".encode())


def nodes_below(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every node that is no group, with its path."""
    if not isinstance(node, Group):
        yield path, node
        return
    for name, child in node.children.items():
        yield from nodes_below(child, (*path, name))


def leaves(node: Any, path: Path = ()) -> list[tuple[Path, Leaf]]:
    """Return the leaves below a node, with their paths."""
    return [(p, n) for p, n in nodes_below(node, path) if isinstance(n, Leaf)]


def replace_nodes(node: Any, others: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return a tree with other nodes at some paths."""
    if path in others:
        return others[path]
    if not isinstance(node, Group):
        return node
    children = {
        name: replace_nodes(child, others, (*path, name))
        for name, child in node.children.items()
    }
    return dataclasses.replace(node, children=children)


def tree_of_nodes(nodes: Mapping[Path, Any]) -> Group:
    """Return a tree of dicts with these nodes and nothing else."""
    root = Group("dict", {})
    for path, node in nodes.items():
        group = root
        for name in path[:-1]:
            below = group.children.setdefault(name, Group("dict", {}))
            assert isinstance(below, Group)
            group = below
        group.children[path[-1]] = node
    return root


Path = tuple[str, ...]  # the escaped names from the root on

# HDF5 takes "/" for the next group, and cannot have the others
_SPECIAL = re.compile(r"[%/\0\ud800-\udfff]")
_LONGEST = 1000


def escape(name: str) -> str:
    """Return a key of a dict as HDF5 may name it: unchanged, but for odd ones.

    Raises:
      ArgumentError: it is longer than 1000 characters.
    """
    if len(name) > _LONGEST:
        raise ArgumentError(
            f"the name {name[:40]!r}... has {len(name)} characters, more than "
            f"{_LONGEST}; shorten it"
        )
    if not name.strip("."):  # HDF5 leaves out "" and "."
        return "%" + "2E" * bool(name) + name[1:]
    return _SPECIAL.sub(lambda match: _percent(match[0]), name)


def unescape(name: str) -> str:
    """Return the key that `escape` made a name of."""
    if name == "%":
        return ""
    return urllib.parse.unquote(name, errors="surrogatepass")


def as_name(key: Any, path: Path) -> str:
    """Return the name of one key of the dict at `path`.

    Raises:
      ArgumentTypeError: it is neither a str nor an int.
    """
    if type(key) is str:
        return escape(key)
    if type(key) is int:
        return str(key)
    raise ArgumentTypeError(
        f"{readable(path)}: the key {shown(key)} of a dict must be a str or an int"
    )


def readable(path: Path) -> str:
    """Return a path as messages show it."""
    return repr("/".join(map(unescape, path)))


def _percent(character: str) -> str:
    data = character.encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in data)


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
