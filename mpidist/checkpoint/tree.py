"""State as a tree: groups of named nodes, with arrays as leaves.

::

    Python                       node
    dict                         Group "dict", or "dict of int" if the keys are integers
    list, tuple                  Group "list", "tuple"; the names are 0, 1, ...
    OrderedDict, deque, ...      the same, with a ContainerType
    None, bool, int, float, ...  Leaf of that kind; large integers and text are bytes
    a module's state_dict        the same, with the versions of modules
    NumPy's scalars              Leaf "array scalar"
    arrays                       Leaf "array"

Nothing here communicates or accesses files.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
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
    "METADATA",
    "NDARRAY",
    "STORED_AS_TEXT",
    "TENSOR",
    "TEXTS",
    "Typed",
    "as_name",
    "child_names",
    "container_type",
    "dtype_text",
    "encode",
    "escape",
    "is_container",
    "leaf_of_array",
    "is_native",
    "keep_versions",
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


STORED_AS_TEXT = ("str", "np.str_", "int")  # of int, only large ones
TEXTS = ("str", "bytes", "np.str_", "np.bytes_")
SCALARS = ("None", "bool", "int", "float", "complex", *TEXTS, "array scalar")
_NUMBERS = {"bool": np.bool_, "float": np.float64, "complex": np.complex128}
DEEPEST = 60


@dataclasses.dataclass(frozen=True)
class Piece:
    """A range of an array's bytes in a file.

    Args:
      file: name of the file; all files of a checkpoint are in one directory.
      start: offset in the array.
      offset: offset in the file.
      checks: length and CRC-32 of the consecutive blocks.
    """

    file: str
    start: int
    offset: int
    checks: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """The number of bytes."""
        return sum(size for size, _ in self.checks)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array, or a value that is stored as one.

    Args:
      kind: "array", or one of `SCALARS`.
      dtype, shape: of the array; those of its bytes for text.
      array: of NumPy or CuPy; None if it is in `pieces`, or empty.
      pieces: its bytes in files, if it was not read yet.
      role: "variable"; of an array in a PyTorch state "tensor" or "ndarray"; or empty.
      is_frozen: whether `array` never changes in place.
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


TENSOR, NDARRAY = "tensor", "ndarray"
METADATA = "_metadata"  # of a PyTorch state_dict


@dataclasses.dataclass(frozen=True)
class Typed:
    """An array of a PyTorch state, with what it is restored as: `Leaf.role`."""

    array: Any
    role: str


@dataclasses.dataclass(frozen=True)
class Link:
    """A node that is in a shard, at the same path."""

    file: str


class ContainerType(NamedTuple):
    """The type of a container other than dict, list and tuple.

    Args:
      name: one of `FAMILIES`.
      details: names of an OrderedDict's keys, in order, for a state_dict after the
        versions of its modules as JSON; name of a defaultdict's
        factory, if built-in; maxlen of a deque, if any; names of a namedtuple's class
        and fields.
    """

    name: str
    details: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """Named nodes.

    Args:
      kind: "dict", "dict of int", "list", "tuple", or "ranks" for per-rank states.
      children: by escaped name.
      role: "object" or "generator" for their states, else empty.
      type: of a container other than dict, list and tuple.
    """

    kind: str
    children: dict[str, Node]
    role: str = ""
    type: ContainerType | None = None


Node = Leaf | Group

FAMILIES: dict[str, str] = {  # the kinds of their groups
    "OrderedDict": "dict",
    "state_dict": "dict",
    "defaultdict": "dict",
    "Counter": "dict",
    "deque": "list",
    "namedtuple": "tuple",
}
FACTORIES: dict[str, Callable[[], Any]] = {
    cls.__name__: cls for cls in (bool, int, float, complex, str, bytes, list, dict)
}


def is_container(value: Any) -> bool:
    """Return whether `value` is a container by tf.nest's rules."""
    return isinstance(value, Mapping | list | tuple | collections.deque)


def child_names(container: Any, path: Path) -> dict[str, Any]:
    """Return the children of a dict, list, tuple or deque by escaped name, sorted.

    Raises:
      ArgumentTypeError: a key that is neither str nor int.
      ArgumentError: both str and int keys in one dict.
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
    """Return the kind of group that stores a container."""
    if isinstance(container, Mapping):
        is_int = bool(container) and type(next(iter(container))) is int
        return "dict of int" if is_int else "dict"
    return "tuple" if isinstance(container, tuple) else "list"


def container_type(container: Any, path: Path) -> ContainerType | None:
    """Return the type of a container; None for dict, list and tuple.

    Supported subclasses: those of `collections`, and namedtuples.
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
        versions = getattr(container, METADATA, None)
        if versions is None:
            return ContainerType("OrderedDict", keys)
        return ContainerType("state_dict", (_versions_text(versions, path), *keys))
    if type(container) is collections.defaultdict:
        known = [n for n, f in FACTORIES.items() if f is container.default_factory]
        return ContainerType("defaultdict", tuple(known))
    is_counter = type(container) is collections.Counter
    return ContainerType("Counter") if is_counter else None


def _versions_text(versions: Any, path: Path) -> str:
    """Return the `_metadata` of a PyTorch state_dict as JSON."""
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(versions)
        if json.loads(text) == versions:
            return text
    raise ArgumentTypeError(
        f"the _metadata of the state_dict {readable(path)} cannot be saved: it must "
        f"hold numbers and text only, not {shown(versions)}"
    )


def keep_versions(old: Any, new: Any) -> None:
    """Give a copy of a state the versions of modules in it, which copies lose."""
    if not is_container(old):
        return
    if hasattr(old, METADATA) and isinstance(new, collections.OrderedDict):
        setattr(new, METADATA, getattr(old, METADATA))
    for key in old if isinstance(old, Mapping) else range(len(old)):
        keep_versions(old[key], new[key])


def require_depth(path: Path) -> None:
    """Raise an ArgumentError if a nest is too deep, or contains itself."""
    if len(path) > DEEPEST:
        raise ArgumentError(
            f"{readable(path[:4])}... has more than {DEEPEST} levels; does it contain "
            "itself?"
        )


def encode(value: Any, path: Path) -> Node:
    """Return the tree of a nest of arrays, numbers and text.

    Raises:
      ArgumentTypeError: a value of another type. (DTypeError: a dtype.)
      ArgumentError: a key, name or depth that cannot be stored.
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
    if isinstance(value, Typed):
        return dataclasses.replace(leaf_of_array(value.array, path), role=value.role)
    if isinstance(value, np.generic):
        stored_as(value.dtype, (), readable(path))
        return _array_leaf("array scalar", np.asarray(value))
    return leaf_of_array(value, path)


def leaf_of_array(value: Any, path: Path) -> Leaf:
    """Return the leaf of an array of any library, without copying."""
    if isinstance(value, bool | int | float | complex | str | bytes | np.void):
        raise _unknown(value, path)  # subclasses, such as enumerations
    try:
        own = value.values[0] if isinstance(value, Mirrored) else value
        is_plain = isinstance(own, np.ndarray) and type(own) is not np.ma.MaskedArray
        array = np.asarray(own) if is_plain else arrays.to_array(own, readable(path))
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
    """Yield every node that is not a group, with its path."""
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


Path = tuple[str, ...]  # escaped names, from the root

# "/" separates groups; HDF5 cannot store the others
_SPECIAL = re.compile(r"[%/\0\ud800-\udfff]")
_LONGEST = 1000


def escape(name: str) -> str:
    """Return a dict key as a valid HDF5 name, unchanged if possible.

    Raises:
      ArgumentError: longer than 1000 characters.
    """
    if len(name) > _LONGEST:
        raise ArgumentError(
            f"the name {name[:40]!r}... has {len(name)} characters, more than "
            f"{_LONGEST}; shorten it"
        )
    if not name.strip("."):  # HDF5 ignores "" and "." in paths
        return "%" + "2E" * bool(name) + name[1:]
    return _SPECIAL.sub(lambda match: _percent(match[0]), name)


def unescape(name: str) -> str:
    """Undo `escape`."""
    if name == "%":
        return ""
    return urllib.parse.unquote(name, errors="surrogatepass")


def as_name(key: Any, path: Path) -> str:
    """Return the name for a key of the dict at `path`.

    Raises:
      ArgumentTypeError: neither a str nor an int.
    """
    if type(key) is str:
        return escape(key)
    if type(key) is int:
        return str(key)
    raise ArgumentTypeError(
        f"{readable(path)}: the key {shown(key)} of a dict must be a str or an int"
    )


def readable(path: Path) -> str:
    """Return a path as shown in messages."""
    return repr("/".join(map(unescape, path)))


def _percent(character: str) -> str:
    data = character.encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in data)


_NUMPY_TEXT = re.compile(r"[<>|=][mMU]\d+(\[\w+\])?")
_ML_TEXT = re.compile(r"bfloat16|float\w+|u?int[1-4]")
Shape = tuple[int, ...]


def is_native(dtype: np.dtype[Any]) -> bool:
    """Return whether HDF5 returns the same dtype, apart from metadata."""
    with contextlib.suppress(TypeError, ValueError, KeyError):
        found = h5py.h5t.py_create(dtype, logical=True).dtype
        return bool(found == dtype) and dtype.itemsize > 0
    return False


def stored_as(
    dtype: np.dtype[Any], shape: Shape, name: str
) -> tuple[np.dtype[Any], Shape]:
    """Return the dtype and shape with which HDF5 stores the bytes of an array.

    Raises:
      DTypeError: the dtype cannot be stored. `name` is for the message.
    """
    if dtype.hasobject:
        raise DTypeError(
            f"{name} has dtype {dtype}, with Python objects; a checkpoint contains no "
            "pickles: convert it to an array of numbers"
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
    """Return the text for `original_dtype`; None for HDF5's own dtypes."""
    if dtype.names is None and dtype.kind in "mMU":
        return str(dtype.str)
    return None if is_native(dtype) else str(dtype.name)


def original_dtype(
    text: str, stored: np.dtype[Any], shape: Shape
) -> tuple[np.dtype[Any], Shape]:
    """Return dtype and shape of an array that is stored as integers.

    Raises:
      ValueError: an unknown dtype, or one that does not match the stored one.
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
