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
import dataclasses
import functools
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from mpidist.checkpoint.format import stored_as
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, MpidistError
from mpidist.util.validation import shown
from mpidist.values import Mirrored

__all__ = [
    "ContainerType",
    "DEEPEST",
    "FAMILIES",
    "Group",
    "Leaf",
    "Node",
    "Path",
    "Piece",
    "SCALARS",
    "STORED_AS_TEXT",
    "TEXTS",
    "as_name",
    "child_names",
    "container_type",
    "decode",
    "decode_leaf",
    "encode",
    "escape",
    "is_container",
    "leaf_of_array",
    "leaves",
    "readable",
    "require_depth",
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
_FACTORIES: dict[str, Callable[[], Any]] = {
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
        known = [n for n, f in _FACTORIES.items() if f is container.default_factory]
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


def decode(node: Node, values: Mapping[int, Any], similar: Any = None) -> Any:
    """Return the nest that a node was made of.

    Args:
      node: what `encode` returned, or a file holds.
      values: the arrays of leaves that have none, by the id of the leaf.
      similar: a nest whose namedtuples and defaultdicts are taken, where they fit; a
        file has no code.

    Raises:
      ValueError, TypeError: it is damaged.
    """
    if isinstance(node, Leaf):
        return decode_leaf(node, values)
    names = list(node.children)
    if node.type is not None and node.type.name == "OrderedDict":
        names = list(node.type.details)
        if sorted(names) != sorted(node.children):
            raise ValueError("the order of keys is not that of the keys there are")
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
    raise ValueError(f"a group of kind {node.kind!r} is no nest")


def _similar_child(similar: Any, kind: str, name: str) -> Any:
    """Return the child of that name, or another one where there is none."""
    is_dict = kind.startswith("dict")
    if (
        not similar
        or not is_container(similar)
        or is_dict != isinstance(similar, Mapping)
    ):
        return None
    if not is_dict:
        return similar[min(int(name), len(similar) - 1)]
    key = unescape(name) if kind == "dict" else int(name)
    return similar[key] if key in similar else next(iter(similar.values()))


def _dict(node: Group, children: dict[Any, Any], similar: Any) -> Any:
    if node.type is None:
        return children
    if node.type.name == "OrderedDict":
        return collections.OrderedDict(children)
    if node.type.name == "Counter":
        return collections.Counter(children)
    factory = _FACTORIES.get(node.type.details[0]) if node.type.details else None
    if isinstance(similar, collections.defaultdict):
        factory = similar.default_factory
    return collections.defaultdict(factory, children)


def _sequence(node: Group, children: list[Any], similar: Any) -> Any:
    if node.type is None:
        return children if node.kind == "list" else tuple(children)
    if node.type.name == "deque":
        limit = int(node.type.details[0]) if node.type.details else None
        return collections.deque(children, limit)
    name, *fields = node.type.details
    if len(fields) != len(children):
        raise ValueError(f"a namedtuple {name!r} of {len(children)} fields")
    if getattr(similar, "_fields", None) == (*fields,):
        return type(similar)(*children)
    return _namedtuple(name, *fields)(*children)


@functools.lru_cache(maxsize=256)
def _namedtuple(name: str, *fields: str) -> Any:
    """Return a class like one that this program may not have.

    `collections.namedtuple` takes nothing but identifiers.
    """
    made = collections.namedtuple(name, fields, rename=True)  # type: ignore[misc] # names are data
    if made._fields != fields:
        raise ValueError(f"{fields} cannot be the fields of a namedtuple")
    return made


def decode_leaf(leaf: Leaf, values: Mapping[int, Any]) -> Any:
    """Return the array, number or text that a leaf was made of."""
    array = values.get(id(leaf), leaf.array)
    if leaf.kind == "None":
        return None
    if leaf.kind == "array":
        return array
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
        raise ValueError(f"a leaf of kind {leaf.kind!r} and shape {leaf.shape}")
    return array.item()


def leaves(node: Node, path: Path = ()) -> list[tuple[Path, Leaf]]:
    """Return all leaves below a node, with their paths."""
    if isinstance(node, Leaf):
        return [(path, node)]
    return [
        found
        for name, child in node.children.items()
        for found in leaves(child, (*path, name))
    ]


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
