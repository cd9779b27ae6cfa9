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

The nodes of a state that is saved are listed by path: one walk yields them, and all
that follows goes through this list. A file that is read is a tree.

Nothing here communicates or accesses files.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import json
import math
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
        return math.prod(self.shape) * self.dtype.itemsize


TENSOR, NDARRAY = "tensor", "ndarray"
METADATA = "_metadata"  # of a PyTorch state_dict


@dataclasses.dataclass(frozen=True)
class Typed:
    """An array of a PyTorch state, with what it is restored as: `Leaf.role`."""

    array: Any
    role: str


@dataclasses.dataclass(frozen=True)
class Link:
    """A node that is in a shard, at the same path.

    Args:
      shard: the number of the shard.
    """

    shard: int


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
      children: by escaped name, of a group that was read; empty in `Nodes`.
      role: "object" or "generator" for their states, else empty.
      type: of a container other than dict, list and tuple.
    """

    kind: str
    children: dict[str, Node] = dataclasses.field(default_factory=dict)
    role: str = ""
    type: ContainerType | None = None


Node = Leaf | Group
# What is to be saved, by path; each group stands before its members
Nodes = dict["Path", Any]

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


class Tracked:
    """Base of Checkpoint: a set of named objects, saved like a dict."""

    @property
    def objects(self) -> dict[str, Any]:
        """The objects by name."""
        raise NotImplementedError(type(self).__name__)  # pragma: no cover


def is_container(value: Any) -> bool:
    """Return whether `value` is a container by tf.nest's rules."""
    return isinstance(value, Mapping | list | tuple | collections.deque)


def children_of(value: Any, path: Path) -> dict[str, Any] | None:
    """Return the members of a container or a Checkpoint by escaped name.

    Those of a dict are sorted. None for other values.

    Raises:
      ArgumentTypeError: a key that is neither str nor int.
      ArgumentError: both str and int keys in one dict; or too many levels.
    """
    if len(path) > DEEPEST:
        raise ArgumentError(
            f"{readable(path[:4])}... has more than {DEEPEST} levels; does it contain "
            "itself?"
        )
    if isinstance(value, Tracked):
        value = value.objects
    if isinstance(value, list | tuple | collections.deque):
        return {str(i): child for i, child in enumerate(value)}
    if not isinstance(value, Mapping):
        return None
    if len({type(key) for key in value}) > 1:
        raise ArgumentError(
            f"{readable(path)}: the keys of a dict must be all str or all int, not "
            f"{list(value)[:8]}"
        )
    return dict(sorted((as_name(key, path), child) for key, child in value.items()))


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the containers and values of a nest, each container before its members."""
    yield path, value
    for name, child in (children_of(value, path) or {}).items():
        yield from walk(child, (*path, name))


def group_of(container: Any, path: Path) -> Group:
    """Return the group of a container, without its members."""
    if isinstance(container, Mapping):
        is_int = bool(container) and type(next(iter(container))) is int
        kind = "dict of int" if is_int else "dict"
    else:
        kind = "tuple" if isinstance(container, tuple) else "list"
    if type(container) in (dict, list, tuple):
        return Group(kind)
    return Group(kind, type=_container_type(container, path))


def _container_type(container: Any, path: Path) -> ContainerType | None:
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


def encode(value: Any, path: Path = ()) -> Nodes:
    """Return the nodes of a nest of arrays, numbers and text.

    Raises:
      ArgumentTypeError: a value of another type. (DTypeError: a dtype.)
      ArgumentError: a key, name or depth that cannot be stored.
    """
    return {
        p: group_of(x, p) if is_container(x) else encode_leaf(x, p)
        for p, x in walk(value, path)
    }


def encode_leaf(value: Any, path: Path) -> Leaf:
    """Return the leaf of an array, a number, text or None; see `encode`."""
    if value is None:
        return Leaf("None", np.dtype(np.uint8), (0,))
    kind = type(value).__name__
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        array = np.asarray(value, np.int64)
    elif type(value) is int:
        array = np.frombuffer(f"{value:#x}".encode(), np.uint8)
    elif type(value) in (str, np.str_):
        kind = "str" if type(value) is str else "np.str_"
        array = np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
    elif type(value) in (bytes, np.bytes_):
        kind = "bytes" if type(value) is bytes else "np.bytes_"
        array = np.frombuffer(value, np.uint8)
    elif type(value) in (bool, float, complex):
        array = np.asarray(value, _NUMBERS[kind])
    elif isinstance(value, Typed):
        return dataclasses.replace(leaf_of_array(value.array, path), role=value.role)
    elif isinstance(value, np.generic):
        if storage(value.dtype) is None:
            raise _unstorable(value.dtype, path)
        kind, array = "array scalar", np.asarray(value)
    else:
        return leaf_of_array(value, path)
    return Leaf(kind, array.dtype, array.shape, array)


def leaf_of_array(value: Any, path: Path) -> Leaf:
    """Return the leaf of an array of any library, without copying."""
    if isinstance(value, bool | int | float | complex | str | bytes | np.void):
        raise _unknown(value, path)  # subclasses, such as enumerations
    try:
        array = value.values[0] if isinstance(value, Mirrored) else value
        if isinstance(array, np.ma.MaskedArray) or not isinstance(array, np.ndarray):
            array = arrays.to_array(array, readable(path))
        else:
            array = np.asarray(array)
    except MpidistError as error:
        if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
            raise
        raise _unknown(value, path) from error
    if storage(array.dtype) is None:
        raise _unstorable(array.dtype, path)
    return Leaf("array", array.dtype, tuple(array.shape), array)


def _unknown(value: Any, path: Path) -> ArgumentTypeError:
    cls = type(value)
    return ArgumentTypeError(
        f"{readable(path)} is a {cls.__module__}.{cls.__qualname__}, which cannot be "
        "saved; give the class methods get_state() and set_state(state), or pass its "
        "variables, arrays and numbers"
    )


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Leaf]]:
    """Yield the leaves of a tree, with their paths."""
    if isinstance(node, Leaf):
        yield path, node
        return
    for name, child in node.children.items():
        yield from leaves(child, (*path, name))


def decode(node: Node, values: Mapping[int, Any], similar: Any = None) -> Any:
    """Return the nest of a tree.

    Args:
      node: from `encode`, or from a file.
      values: the arrays of leaves with pieces, by `id(leaf)`.
      similar: a nest whose classes of namedtuples, and default factories, to use where
        they match; a file contains no code.

    Raises:
      ValueError, TypeError: the tree is damaged.
    """
    if isinstance(node, Leaf):
        return decode_leaf(node, values)
    names = list(node.children)
    if node.type is not None and node.type.name in ("OrderedDict", "state_dict"):
        names = list(node.type.details[node.type.name == "state_dict" :])
        if sorted(names) != sorted(node.children):
            raise ValueError("the saved order of keys does not match the keys")
    children = {}
    for name in names:
        beside = _similar_child(similar, node.kind, name)
        children[name] = decode(node.children[name], values, beside)
    if node.kind in ("list", "tuple"):
        ordered = [children[str(i)] for i in range(len(children))]
        return _sequence(node, ordered, similar)
    if node.kind == "dict":
        return _dict(
            node, {unescape(n): child for n, child in children.items()}, similar
        )
    if node.kind == "dict of int":
        return _dict(node, {int(n): child for n, child in children.items()}, similar)
    raise ValueError(f"a group of kind {node.kind!r} is not a nest")


def _similar_child(similar: Any, kind: str, name: str) -> Any:
    """Return the child of that name, or else any other child."""
    is_dict = kind.startswith("dict")
    if (
        not similar
        or not is_container(similar)
        or is_dict != isinstance(similar, Mapping)
    ):
        return None
    if not is_dict:
        # A list may have grown since: its last element stands for the new ones.
        return similar[min(int(name), len(similar) - 1)]
    key = unescape(name) if kind == "dict" else int(name)
    return similar[key] if key in similar else next(iter(similar.values()))


def _dict(node: Group, children: dict[Any, Any], similar: Any) -> Any:
    if node.type is None:
        return children
    if node.type.name == "OrderedDict":
        return collections.OrderedDict(children)
    if node.type.name == "state_dict":
        made = collections.OrderedDict(children)
        setattr(made, METADATA, versions_of(node))
        return made
    if node.type.name == "Counter":
        return collections.Counter(children)
    # A factory is a function; only built-in ones have names, others come from
    # `similar`.
    factory = FACTORIES.get(node.type.details[0]) if node.type.details else None
    if isinstance(similar, collections.defaultdict):
        factory = similar.default_factory
    return collections.defaultdict(factory, children)


def versions_of(group: Group) -> Any:
    """Return the versions of modules in a state_dict; None of another group."""
    if group.type is None or group.type.name != "state_dict":
        return None
    return collections.OrderedDict(json.loads(group.type.details[0]))


def _sequence(node: Group, children: list[Any], similar: Any) -> Any:
    if node.type is None:
        return children if node.kind == "list" else tuple(children)
    if node.type.name == "deque":
        limit = int(node.type.details[0]) if node.type.details else None
        return collections.deque(children, limit)
    name, *fields = node.type.details
    if len(fields) != len(children):
        raise ValueError(f"a namedtuple {name!r} has {len(children)} fields")
    if getattr(similar, "_fields", None) == (*fields,):
        return type(similar)(*children)
    return _namedtuple(name, *fields)(*children)


@functools.lru_cache(maxsize=256)
def _namedtuple(name: str, *fields: str) -> Any:
    """Return a namedtuple class for one that this program may lack.

    `collections.namedtuple` only accepts identifiers.
    """
    # rename=True instead of an exception; compared below.
    made = collections.namedtuple(name, fields, rename=True)  # type: ignore[misc] # names are data
    if made._fields != fields:
        raise ValueError(f"{fields} cannot be the fields of a namedtuple")
    return made


def decode_leaf(leaf: Leaf, values: Mapping[int, Any]) -> Any:
    """Return the array, number or text of a leaf."""
    array = values.get(id(leaf), leaf.array)
    if leaf.kind == "None":
        return None
    if leaf.kind == "array":
        is_typed = leaf.role in (TENSOR, NDARRAY)
        return Typed(array, leaf.role) if is_typed else array
    if leaf.kind == "array scalar":
        return array[()]
    if leaf.kind in ("bytes", "np.bytes_"):
        data = array.tobytes()
        return data if leaf.kind == "bytes" else np.bytes_(data)
    if leaf.kind in ("str", "np.str_"):
        text = array.tobytes().decode("utf-8", "surrogatepass")
        return text if leaf.kind == "str" else np.str_(text)
    if leaf.kind == "int" and leaf.dtype == np.uint8:
        return int(array.tobytes().decode("ascii"), 16)
    if leaf.kind not in SCALARS or leaf.shape:
        raise ValueError(f"a leaf has kind {leaf.kind!r} and shape {leaf.shape}")
    return array.item()


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
    text = "/".join(path)
    return repr("/".join(map(unescape, path)) if "%" in text else text)


def _percent(character: str) -> str:
    data = character.encode("utf-8", "surrogatepass")
    return "".join(f"%{byte:02X}" for byte in data)


_NUMPY_TEXT = re.compile(r"[<>|=][mMU]\d+(\[\w+\])?")
_ML_TEXT = re.compile(r"bfloat16|float\w+|u?int[1-4]")
Shape = tuple[int, ...]


class Storage(NamedTuple):
    """How HDF5 stores the bytes of an array of some dtype.

    Args:
      dtype: in the file; None if it is the array's own.
      inner: further dimensions there: the characters of text.
      text: for `original_dtype`; None for dtypes that HDF5 has itself.
    """

    dtype: np.dtype[Any] | None = None
    inner: tuple[int, ...] = ()
    text: str | None = None


@functools.lru_cache(maxsize=1024)
def storage(dtype: np.dtype[Any]) -> Storage | None:
    """Return how HDF5 stores a dtype; None if it cannot be stored."""
    if dtype.hasobject:
        return None
    if dtype.names is None and dtype.kind in "mM":
        return Storage(np.dtype("i8").newbyteorder(dtype.byteorder), (), dtype.str)
    if dtype.kind == "U" and dtype.itemsize:
        characters = np.dtype("u4").newbyteorder(dtype.byteorder)
        return Storage(characters, (dtype.itemsize // 4,), dtype.str)
    if _is_native(dtype):
        return Storage()
    if dtype.names is None and dtype.itemsize in (1, 2) and _is_ml(dtype):
        return Storage(np.dtype(f"u{dtype.itemsize}"), (), dtype.name)
    return None


def stored_as(leaf: Leaf) -> tuple[np.dtype[Any], Shape]:
    """Return the dtype and shape with which HDF5 stores the bytes of an array."""
    kind = storage(leaf.dtype)
    assert kind is not None  # `encode_leaf` has refused others
    dtype = leaf.dtype if kind.dtype is None else kind.dtype
    return dtype, (*leaf.shape, *kind.inner)


def _is_native(dtype: np.dtype[Any]) -> bool:
    """Return whether HDF5 returns the same dtype, apart from metadata."""
    with contextlib.suppress(TypeError, ValueError, KeyError):
        stored = h5py.h5t.py_create(dtype, logical=True).dtype
        return bool(stored == dtype) and dtype.itemsize > 0
    return False


def _unstorable(dtype: np.dtype[Any], path: Path) -> DTypeError:
    if dtype.hasobject:
        return DTypeError(
            f"{readable(path)} has dtype {dtype}, with Python objects; a checkpoint "
            "contains no pickles: convert it to an array of numbers"
        )
    return DTypeError(
        f"{readable(path)} has dtype {dtype}, which HDF5 does not have; convert it "
        "first"
    )


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
    expected = storage(dtype)
    if expected is None or expected.dtype != stored:
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
    scalar = getattr(ml_dtypes, name, None)
    if not isinstance(scalar, type) or not issubclass(scalar, np.generic):
        raise ValueError(f"there is no dtype {name!r}")
    return np.dtype(scalar)
