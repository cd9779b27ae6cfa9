"""State as a tree: groups of named nodes, with arrays as leaves.

::

    Python                       node
    dict                         Group "dict", or "dict of int" if the keys are integers
    list, tuple                  Group "list", "tuple"; the names are 0, 1, ...
    the same, of equal types     Leaf "list of float", ...
    OrderedDict, deque, ...      the same, with a ContainerType
    a module's state_dict        the same, with the versions of modules
    None, bool, int, float, ...  Leaf of that kind; large integers and text are bytes
    NumPy's scalars              Leaf "array scalar"
    arrays                       Leaf "array"

What a kind of leaf or a type of container is, `LEAF_KINDS` and `CONTAINERS` say. The
nodes of a state that is saved are listed by path: one walk yields them, and all
that follows goes through this list. A file that is read is a tree.

Nothing here communicates or accesses files.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
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
from mpidist.errors import ArgumentError, ArgumentTypeError, DTypeError, MpidistError
from mpidist.util.dtypes import foreign, traits
from mpidist.util.validation import shown
from mpidist.values import Mirrored

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
      kind: one of `LEAF_KINDS`.
      dtype, shape: of the array; those of its bytes for text.
      array: of NumPy or CuPy; None if it is in `pieces`, or empty.
      pieces: its bytes in files, if it was not read yet.
      role: "variable"; of an array in a PyTorch state "tensor" or "ndarray"; or empty.
      is_frozen: whether `array` never changes in place.
      type: of a list of numbers, if not a list or tuple.
    """

    kind: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    array: Any = dataclasses.field(default=None, compare=False)
    pieces: tuple[Piece, ...] = ()
    role: str = ""
    is_frozen: bool = False
    type: ContainerType | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle: an array as bytes, as NumPy swaps those of others."""
        data = None if self.array is None else self.array.tobytes()
        return {**vars(self), "array": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["array"] is not None:
            data = bytearray(state["array"])
            state["array"] = np.ndarray(state["shape"], state["dtype"], data)
        vars(self).update(state)

    @property
    def family(self) -> str:
        """The kind of group that it stands for: "list", "tuple" or empty."""
        return LEAF_KINDS[self.kind].family

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
      name: one of `CONTAINERS`.
      details: the versions of a state_dict's modules as JSON; name of a defaultdict's
        factory; maxlen of a deque, if any; names of a namedtuple's class and fields.
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
      names: of a dict's members in its order; empty if unknown, as in older files.
    """

    kind: str
    children: dict[str, Node] = dataclasses.field(default_factory=dict)
    role: str = ""
    type: ContainerType | None = None
    names: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The kind without that of the keys."""
        return self.kind.partition(" ")[0]

    @property
    def facts(self) -> tuple[Any, ...]:
        """What must be equal on all ranks: the order of a dict need not."""
        is_ordered = self.type is not None and CONTAINERS[self.type.name].is_ordered
        return self.kind, self.role, self.type, self.names if is_ordered else ()


Node = Leaf | Group
# What is to be saved, by path; each group stands before its members
Nodes = dict["Path", Any]


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

    Those of a dict are sorted: ranks may have them in another order. None for other
    values, and for lists of numbers, which are leaves.

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
        if numbers_kind(value):
            return None
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
    name = next(n for n, row in CONTAINERS.items() if row.recognise(container))
    row, special = CONTAINERS[name], None
    if name != row.family:
        special = ContainerType(name, row.details(container, path))
    if row.family != "dict":
        return Group(row.family, type=special)
    names = tuple(as_name(key, path) for key in container)
    is_int = type(next(iter(container), None)) is int
    return Group("dict" + " of int" * is_int, type=special, names=names)


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
    return {p: encode_node(x, p) for p, x in walk(value, path)}


def encode_node(value: Any, path: Path) -> Group | Leaf:
    """Return the node of a container without its members, or the leaf of a value."""
    kind, special = scalar_kind(value), None
    if is_container(value):
        kind, group = numbers_kind(value), group_of(value, path)
        if not kind:
            return group
        special = group.type
    if isinstance(value, Typed):
        return dataclasses.replace(leaf_of_array(value.array, path), role=value.role)
    if not kind:
        return leaf_of_array(value, path)
    array = LEAF_KINDS[kind].encode(value)
    if storage(array.dtype) is None:
        raise _unstorable(array.dtype, path)
    return Leaf(kind, array.dtype, array.shape, array, type=special)


def leaf_of_array(value: Any, path: Path) -> Leaf:
    """Return the leaf of an array of any library, without copying."""
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        raise cannot_save(value, path)  # subclasses, such as enumerations
    try:
        array = value.values[0] if isinstance(value, Mirrored) else value
        if not isinstance(array, np.ndarray):
            array = arrays.to_array(array, readable(path))
        elif type(array) is not np.ndarray:  # others keep their order of bytes
            arrays.require_plain(array, readable(path))
            array = np.asarray(array)
    except MpidistError as error:
        if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
            raise
        raise cannot_save(value, path) from error
    if storage(array.dtype) is None:
        raise _unstorable(array.dtype, path)
    return Leaf("array", array.dtype, tuple(array.shape), array)


def cannot_save(value: Any, path: Path) -> ArgumentTypeError:
    """Return the error for a value of a type that cannot be saved."""
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


def decode(node: Node, values: Mapping[int, Any], *similar: Any) -> Any:
    """Return the nest of a tree.

    Args:
      node: from `encode`, or from a file.
      values: the arrays of leaves with pieces, by `id(leaf)`.
      similar: nests whose classes of namedtuples, and default factories, to use where
        they match; a file contains no code.

    Raises:
      ValueError, TypeError: the tree is damaged, or needs a similar nest.
    """
    if isinstance(node, Leaf):
        made = decode_leaf(node, values)
    else:
        made = _decode_members(node, values, similar)
    if not node.family:
        return made
    name, details = node.type or ContainerType(node.family)
    return CONTAINERS[name].make(made, details, similar)


def _decode_members(
    group: Group, values: Mapping[int, Any], similar: tuple[Any, ...]
) -> Any:
    alike: list[Mapping[Any, Any]] = [
        x if isinstance(x, Mapping) else dict(enumerate(x))
        for x in similar
        if is_container(x) and isinstance(x, Mapping) == (group.family == "dict")
    ]
    # As a list may have grown, or shrunk, a member may resemble any of the others
    classes = {type(member): member for x in alike for member in x.values()}
    others = tuple(classes.values())
    read_key: Callable[[str], Any] = unescape if group.kind == "dict" else int
    members = {}
    for name, child in group.children.items():
        key = read_key(name)
        same = tuple(x[key] for x in alike if key in x)
        members[key] = decode(child, values, *same, *others)
    if group.family == "dict":
        return members
    return [members[i] for i in range(len(members))]


def versions_of(group: Group) -> Any:
    """Return the versions of modules in a state_dict; None of another group."""
    if group.type is None or group.type.name != "state_dict":
        return None
    return collections.OrderedDict(json.loads(group.type.details[0]))


class ContainerKind(NamedTuple):
    """A type of containers.

    Args:
      family: the kind of its groups, without that of the keys.
      recognise: returns whether a container is of this type.
      details: returns those of its `ContainerType`, given its path.
      make: returns a container of members, details and similar containers.
      is_ordered: whether it is another value if its members have another order.
    """

    family: str
    recognise: Callable[[Any], bool]
    details: Callable[[Any, Path], tuple[str, ...]]
    make: Callable[[Any, tuple[str, ...], tuple[Any, ...]], Any]
    is_ordered: bool


_FACTORIES: dict[str, Any] = {
    cls.__name__: cls for cls in (bool, int, float, complex, str, bytes, list, dict)
} | {"None": None}
_A_FUNCTION = "a function"  # of the program, which a file cannot hold


def _factory_name(container: Any, _: Path) -> tuple[str, ...]:
    factory = container.default_factory
    known = [name for name, known in _FACTORIES.items() if known is factory]
    return (*known, _A_FUNCTION)[:1]


def _defaultdict(members: Any, details: tuple[str, ...], similar: Any) -> Any:
    # Older versions have no details for a function, nor for None
    name = details[0] if details else _A_FUNCTION
    if name in _FACTORIES:
        return collections.defaultdict(_FACTORIES[name], members)
    functions = [getattr(x, "default_factory", None) for x in similar]
    functions.sort(key=lambda function: function in _FACTORIES.values())
    if details and not any(functions):
        raise ValueError(
            "a defaultdict has a function of the program as its default_factory, which "
            "a file cannot hold; have such a defaultdict there before restoring"
        )
    return collections.defaultdict(next(filter(None, functions), None), members)


def _namedtuple(members: Any, details: tuple[str, ...], similar: Any) -> Any:
    name, *fields = details
    if len(fields) != len(members):
        raise ValueError(f"a namedtuple {name!r} has {len(members)} fields")
    known = [type(x) for x in similar if getattr(x, "_fields", None) == (*fields,)]
    named = [cls for cls in known if cls.__name__ == name]
    cls = [*named, *known] or [_namedtuple_class(name, *fields)]
    return tuple.__new__(cls[0], members)


@functools.lru_cache(maxsize=256)
def _namedtuple_class(name: str, *fields: str) -> Any:
    """Return a namedtuple class for one that this program may lack.

    `collections.namedtuple` only accepts identifiers.
    """
    # rename=True instead of an exception; compared below.
    made = collections.namedtuple(name, fields, rename=True)  # type: ignore[misc] # names are data
    if made._fields != fields:
        raise ValueError(f"{fields} cannot be the fields of a namedtuple")
    return made


def _versions_text(container: Any, path: Path) -> tuple[str]:
    versions = getattr(container, METADATA)
    with contextlib.suppress(TypeError, ValueError):
        text = json.dumps(versions)
        if json.loads(text) == versions:
            return (text,)
    raise ArgumentTypeError(
        f"the _metadata of the state_dict {readable(path)} cannot be saved: it must "
        f"hold numbers and text only, not {shown(versions)}"
    )


def _state_dict(members: Any, details: tuple[str, ...], _: Any) -> Any:
    made = collections.OrderedDict(members)
    setattr(made, METADATA, collections.OrderedDict(json.loads(details[0])))
    return made


def _only(cls: type) -> Callable[..., Any]:
    return lambda members, *_: cls(members)


def _like(name: str, cls: type) -> Callable[..., Any]:
    """Return a function that makes a container of a similar one's class, else `cls`."""

    def make(members: Any, _: Any, similar: Any) -> Any:
        first: Any = similar[0] if similar else None
        if type(first) is cls or not is_container(first):
            return cls(members)
        group = group_of(first, ())
        if (group.family, group.type) != (name, None):
            return cls(members)
        if not isinstance(first, dict | list):
            return type(first)(members)
        made = copy.copy(first)  # with its attributes
        made.clear()
        (made.extend if isinstance(made, list) else made.update)(members)
        return made

    return make


_OrderedDict, _deque = collections.OrderedDict, collections.deque
CONTAINERS = {
    "namedtuple": ContainerKind(
        "tuple",
        lambda x: isinstance(x, tuple) and hasattr(x, "_fields"),
        lambda x, _: (type(x).__name__, *x._fields),
        _namedtuple,
        False,
    ),
    "deque": ContainerKind(
        "list",
        lambda x: type(x) is _deque,
        lambda x, _: () if x.maxlen is None else (str(x.maxlen),),
        lambda members, details, _: _deque(members, *map(int, details)),
        False,
    ),
    "state_dict": ContainerKind(
        "dict",
        lambda x: type(x) is _OrderedDict and getattr(x, METADATA, None) is not None,
        _versions_text,
        _state_dict,
        True,
    ),
    "OrderedDict": ContainerKind(
        "dict",
        lambda x: type(x) is _OrderedDict,
        lambda *_: (),
        _only(_OrderedDict),
        True,
    ),
    "defaultdict": ContainerKind(
        "dict",
        lambda x: type(x) is collections.defaultdict,
        _factory_name,
        _defaultdict,
        False,
    ),
    "Counter": ContainerKind(
        "dict",
        lambda x: type(x) is collections.Counter,
        lambda *_: (),
        _only(collections.Counter),
        False,
    ),
    # All others, without a ContainerType; subclasses come back where a similar one is
    "dict": ContainerKind(
        "dict",
        lambda x: isinstance(x, Mapping),
        lambda *_: (),
        _like("dict", dict),
        False,
    ),
    "tuple": ContainerKind(
        "tuple",
        lambda x: isinstance(x, tuple),
        lambda *_: (),
        _like("tuple", tuple),
        False,
    ),
    "list": ContainerKind(
        "list", is_container, lambda *_: (), _like("list", list), False
    ),
}


class LeafKind(NamedTuple):
    """What a value of some kind is in memory, in a file, and on other ranks.

    Args:
      cls: the type of values of this kind; None if that does not tell.
      encode: returns an array for a value.
      decode: returns the value of an array.
      forms: kind of dtype and number of dimensions of such arrays; empty for any.
      compare: returns a text for an array, equal for equal values.
      is_text: whether bytes are stored as one text, or as nothing if there are none.
      is_array: whether an array can be restored from it.
      family: the kind of group that it stands for: "list", "tuple" or empty.
      shown: describes a leaf in messages.
    """

    cls: type | None
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]
    forms: tuple[str, ...]
    compare: Callable[[Any], str]
    is_text: bool
    is_array: bool
    family: str
    shown: str


def _bytes_array(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def _text_array(text: str) -> Any:
    return _bytes_array(text.encode("utf-8", "surrogatepass"))


def _text_of(array: Any) -> str:
    return str(array.tobytes().decode("utf-8", "surrogatepass"))


_NUMBERS = {"bool": "b1", "int": "i8", "float": "f8", "complex": "c16"}
_ONE = False, "", "one {0.kind}"  # the last fields of a kind of single values


def _number(cls: Any, dtype: str) -> LeafKind:
    encode = functools.partial(np.asarray, dtype=dtype)
    form = f"{dtype[0]}0"
    return LeafKind(
        cls, encode, cls, (form,), lambda x: x.tobytes().hex(), False, *_ONE
    )


def _text(cls: type, encode: Any, decode: Any, is_text: bool) -> LeafKind:
    return LeafKind(cls, encode, decode, ("u1",), arrays.checksum, is_text, *_ONE)


def _several(family: str, element: str, dtype: str) -> LeafKind:

    def encode(values: Any) -> Any:
        return np.array(list(values), dtype or values[0].dtype)

    decode: Callable[[Any], Any] = np.ndarray.tolist if dtype else list
    forms = (f"{dtype[0]}1",) if dtype else ()
    how = (
        arrays.checksum,
        False,
        False,
        family,
        f"a {family} of {{0.shape[0]}} {element}",
    )
    return LeafKind(None, encode, decode, forms, *how)


LEAF_KINDS = {
    "None": _text(type(None), lambda _: _bytes_array(b""), lambda _: None, True),
    **{name: _number(getattr(builtins, name), kind) for name, kind in _NUMBERS.items()},
    "int": LeafKind(  # large ones as text
        int,
        lambda x: (
            np.asarray(x, "i8")
            if x.bit_length() < 64
            else _bytes_array(f"{x:#x}".encode())
        ),
        lambda x: int(x.tobytes(), 16) if x.dtype == np.uint8 else int(x),
        ("i0", "u1"),
        lambda x: x.tobytes().hex(),
        True,
        *_ONE,
    ),
    "str": _text(str, _text_array, _text_of, True),
    "np.str_": _text(np.str_, _text_array, lambda x: np.str_(_text_of(x)), True),
    "bytes": _text(bytes, _bytes_array, np.ndarray.tobytes, False),
    "np.bytes_": _text(np.bytes_, _bytes_array, lambda x: np.bytes_(bytes(x)), False),
    "array scalar": LeafKind(
        None,
        np.asarray,
        lambda x: x[()],
        (),
        lambda x: arrays.value_bytes(x).tobytes().hex(),  # perhaps with padding
        False,
        True,
        "",
        "one {0.kind}",
    ),
    "array": LeafKind(
        None,
        np.asarray,
        np.asarray,
        (),
        arrays.checksum,
        False,
        True,
        "",
        "an array of {0.dtype} {0.shape}",
    ),
    **{
        f"{family} of {element}": _several(family, element, dtype)
        for family in ("list", "tuple")
        for element, dtype in {**_NUMBERS, "array scalar": ""}.items()
    },
}
_KIND_OF_CLASS = {row.cls: name for name, row in LEAF_KINDS.items() if row.cls}


def scalar_kind(value: Any) -> str:
    """Return the kind of leaf of a number, text or None; empty for other values."""
    kind = _KIND_OF_CLASS.get(type(value), "")
    if kind or not isinstance(value, np.generic) or isinstance(value, np.record):
        return kind
    return "array scalar" if type(value) is value.dtype.type else ""


def numbers_kind(value: Any) -> str:
    """Return the kind of leaf of a list of numbers of one type; else an empty text."""
    if type(value) not in (list, tuple, collections.deque):
        return ""
    if len(set(map(type, value))) != 1:
        return ""
    element = scalar_kind(value[0])
    if element == "int" and max(map(int.bit_length, value)) > 63:
        return ""
    if element == "array scalar" and not _is_one_dtype(value):
        return ""
    kind = f"{'tuple' if type(value) is tuple else 'list'} of {element}"
    return kind if kind in LEAF_KINDS else ""


def _is_one_dtype(scalars: Any) -> bool:
    dtype = scalars[0].dtype
    is_number = dtype.names is None and storage(dtype) is not None
    return is_number and all(x.dtype == dtype for x in scalars)


def decode_leaf(leaf: Leaf, values: Mapping[int, Any]) -> Any:
    """Return the value of a leaf; the members of a list of numbers.

    Raises:
      ValueError, TypeError: the leaf is damaged.
    """
    array, row = values.get(id(leaf), leaf.array), LEAF_KINDS[leaf.kind]
    form = f"{leaf.dtype.kind}{len(leaf.shape)}" * traits(leaf.dtype).is_native
    if row.forms and form not in row.forms:
        raise ValueError(f"a {leaf.kind} has dtype {leaf.dtype}, shape {leaf.shape}")
    is_typed = leaf.role in (TENSOR, NDARRAY)
    return Typed(array, leaf.role) if is_typed else row.decode(array)


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
    found = traits(dtype)
    if not found.is_sent:
        return None
    if not found.stored or not dtype.itemsize:
        return Storage() if _is_native(dtype) else None
    if not found.is_native:
        return Storage(np.dtype(found.stored), (), dtype.name)
    stored = np.dtype(found.stored).newbyteorder(dtype.byteorder)
    inner = (dtype.itemsize // stored.itemsize,) if found.family == "text" else ()
    return Storage(stored, inner, dtype.str)


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
    dtype = np.dtype(text) if _NUMPY_TEXT.fullmatch(text) else foreign(text)
    expected = storage(dtype)
    if expected is None or expected.dtype != stored:
        raise ValueError(f"dtype {text!r} is not stored as {stored}")
    if not expected.inner:
        return dtype, shape
    if not shape or shape[-1] != dtype.itemsize // 4:
        raise ValueError(f"dtype {text!r} is not stored in shape {shape}")
    return dtype, shape[:-1]
