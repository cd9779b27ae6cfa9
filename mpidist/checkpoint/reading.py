"""Read the files of a checkpoint as a tree, and decode trees to nests.

The checksum of the structure is verified before HDF5 parses it. Large arrays are read
in pieces, each by one rank, which broadcasts it.
"""

from __future__ import annotations

import bisect
import collections
import functools
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpidist.checkpoint.format import (
    Header,
    InMemoryFile,
    Shard,
    checked_read,
    damage,
    header_crc32,
    open_file,
    parse,
    read_header_bytes,
)
from mpidist.checkpoint.tree import (
    DEEPEST,
    FACTORIES,
    FAMILIES,
    METADATA,
    NDARRAY,
    SCALARS,
    STORED_AS_TEXT,
    TENSOR,
    ContainerType,
    Group,
    Leaf,
    Node,
    Piece,
    Typed,
    is_container,
    original_dtype,
    unescape,
)
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.hdf5.index import contiguous_offset
from mpidist.strategy.extended import StrategyExtended

__all__ = ["decode", "load", "read_tree", "versions_of"]

_GROUP_KINDS = ("dict", "dict of int", "list", "tuple", "ranks")
_DEEPEST = DEEPEST + 1  # with the ranks of a state
_MESSAGE_BYTES = 64 << 20


def read_tree(path: Path) -> Group:
    """Return the tree of a checkpoint, with large arrays as pieces of its files.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    # First without the shards, to learn which there are.
    tree, header = _read_file(path, {})
    shards = {}
    for shard in header.shards:
        beside = path.with_name(shard.name)
        with damage(path):
            # Checked before it is read: a shard of another save has the same name
            # pattern.
            _require_shard(beside, shard)
        shards[shard.name], _ = _read_file(beside, {})
    # Again with the shards, whose nodes replace links and virtual datasets.
    return tree if not shards else _read_file(path, shards)[0]


def _require_shard(path: Path, shard: Shard) -> None:
    """Raise if a file is not the shard that the index lists."""
    if header_crc32(path) != shard.crc32:
        raise ValueError(f"{path.name} belongs to another checkpoint")


def _read_file(path: Path, shards: Mapping[str, Group]) -> tuple[Group, Header]:
    with open_file(path) as descriptor:
        # The header has a checksum of its own, and limits what is read after it.
        text = read_header_bytes(descriptor)
        header = parse(text)
        image = _read_structure(descriptor, len(text), header)
        # HDF5 sees verified bytes in memory, and never the file itself.
        with h5py.File(image, "r") as file:
            tree = _Reader(file, path.name, header, image, shards).group(file, "")
    return tree, header


def _read_structure(descriptor: int, start: int, header: Header) -> InMemoryFile:
    """Read everything but header and large arrays, and verify its checksum."""
    # A file that was cut short, or grew, is damaged whatever its checksums say.
    found = os.fstat(descriptor).st_size
    if found != header.size:
        raise ValueError(f"it has {found} bytes instead of {header.size}")
    image = InMemoryFile(header.size)
    # Arrays are verified block by block when they are read; this is all the rest.
    holes = [(offset, size) for offset, size, _ in header.data]
    parts, crc32 = [], 0
    for offset, size in [*holes, (header.size, 0)]:
        if start < offset:
            data = os.pread(descriptor, offset - start, start)
            crc32 = zlib.crc32(data, crc32)
            parts.append((start, data))
        start = offset + size
    # Verified before HDF5 parses it: damaged structures can crash HDF5.
    if crc32 != header.structure_crc32:
        raise ValueError("the checksum of its structure does not match")
    for offset, data in parts:
        image.put(offset, data)
    image.compact()
    return image


class _Reader:
    """Converts groups and datasets to nodes.

    A malicious file may have one object at many paths, and one range of bytes in many
    datasets. Each is accepted once, so the tree is no larger than the file.
    """

    def __init__(
        self,
        file: h5py.File,
        name: str,
        header: Header,
        image: InMemoryFile,
        shards: Mapping[str, Group],
    ):
        self._file = file
        self._name = name
        self._header = header
        self._image = image
        self._shards = shards
        self._seen: set[int] = {h5py.h5o.get_info(file["/"].id).addr}
        self._offsets = [offset for offset, _, _ in header.data]
        # Bytes that no dataset has claimed yet: of the arrays' blocks, of the structure
        self._blocks_left = sum(size for _, size, _ in header.data)
        self._structure_left = header.size - self._blocks_left

    def group(self, group: h5py.Group, path: str) -> Group:
        # A file may claim any depth; recursion must not.
        if path.count("/") > _DEEPEST:
            raise ValueError(f"{path[:40]!r}... has more than {_DEEPEST} levels")
        kind, role = _attributes(group)
        if kind not in _GROUP_KINDS:
            raise ValueError(f"group {path!r} has kind {kind!r}")
        names = list(group)
        # Lists have their order by number; HDF5 sorts names as text.
        if kind in ("list", "tuple", "ranks"):
            names = [str(i) for i in range(len(names))]
        children: dict[str, Node] = {}
        for name in names:
            found = self._node(group, name, f"{path}/{name}")
            if found is not None:
                children[name] = found
        return Group(kind, children, role, _container_type(group, kind))

    def _node(self, group: h5py.Group, name: str, path: str) -> Node | None:
        link = group.get(name, getlink=True)
        # Into a shard; in the first pass the shards were not read yet.
        if isinstance(link, h5py.ExternalLink):
            return self._in_shard(link.filename, path) if self._shards else None
        # Soft links could lead anywhere, or in circles.
        if not isinstance(link, h5py.HardLink):
            raise ValueError(f"{path!r} is a link")
        child = group[name]
        # An address seen twice is a second hard link: it could make the tree endless.
        address = h5py.h5o.get_info(child.id).addr
        if address in self._seen:
            raise ValueError(f"{path!r} is a second link to one object")
        self._seen.add(address)
        if isinstance(child, h5py.Group):
            return self.group(child, path)
        if not isinstance(child, h5py.Dataset):
            raise ValueError(f"{path!r} is neither a group nor a dataset")
        return self._leaf(child, path)

    def _leaf(self, dataset: h5py.Dataset, path: str) -> Leaf:
        kind, role = _attributes(dataset)
        if kind not in (*SCALARS, "array"):
            raise ValueError(f"dataset {path!r} has kind {kind!r}")
        if dataset.is_virtual:
            return self._split_leaf(dataset, path, kind, role)
        return self._plain_leaf(dataset, path, kind, role)

    def _plain_leaf(
        self, dataset: h5py.Dataset, path: str, kind: str, role: str
    ) -> Leaf:
        """Return the leaf of a dataset of this file."""
        dtype, shape = _dtype_and_shape(dataset)
        # Python integers: a product of 64-bit sizes may overflow NumPy's.
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        offset = contiguous_offset(dataset) or 0
        if size and not offset:
            raise ValueError(f"dataset {path!r} is not contiguous")
        first = bisect.bisect_left(self._offsets, offset)
        last = bisect.bisect_left(self._offsets, offset + size)
        checks = tuple((n, crc32) for _, n, crc32 in self._header.data[first:last])
        self._claim(size, path, is_block=bool(checks))
        if checks:
            # Large: record only its location; `load` reads it, perhaps on another rank.
            piece = Piece(self._name, 0, offset, checks)
            if piece.size != size or self._offsets[first] != offset:
                raise ValueError(
                    f"dataset {path!r} is not at the position of its blocks"
                )
            return Leaf(kind, dtype, shape, None, (piece,), role)
        data = self._image.get(offset, size) if size else b""
        array = np.frombuffer(data, dtype).reshape(shape).copy()
        return Leaf(kind, dtype, shape, array, (), role)

    def _claim(self, size: int, path: str, *, is_block: bool) -> None:
        # A dataset may point into bytes that another one has used already.
        if is_block:
            self._blocks_left -= size
        else:
            self._structure_left -= size
        if min(self._blocks_left, self._structure_left) < 0:
            raise ValueError(f"dataset {path!r} has more bytes than remain in the file")

    def _split_leaf(
        self, dataset: h5py.Dataset, path: str, kind: str, role: str
    ) -> Leaf:
        """Return the leaf of a dataset whose parts are in shards."""
        dtype, shape = _original(dataset, dataset.dtype, dataset.shape)
        pieces = self._pieces(path, dtype.itemsize)
        leaf = Leaf(kind, dtype, shape, None, pieces, role)
        found = sum(piece.size for piece in pieces)
        if self._shards and found != leaf.size_bytes:
            raise ValueError(
                f"dataset {path!r} has {found} bytes instead of {leaf.size_bytes}"
            )
        return leaf

    def _in_shard(self, name: str, path: str) -> Node:
        """Return the node at the same path of a shard."""
        node: Node = self._shards[name]
        for part in path.strip("/").split("/"):
            if not isinstance(node, Group):
                raise ValueError(f"{path!r} is not in {name}")
            node = node.children[part]
        return node

    def _pieces(self, path: str, item_bytes: int) -> tuple[Piece, ...]:
        """Return the pieces of an array, in the order of the shards.

        Some shards may have no part of it.
        """
        pieces: list[Piece] = []
        start = 0
        for name in self._shards:
            try:
                leaf = self._in_shard(name, path)
            except KeyError:
                continue
            if not isinstance(leaf, Leaf) or leaf.dtype.itemsize != item_bytes:
                raise ValueError(f"dataset {path!r} is not in {name}")
            (piece,) = leaf.pieces  # parts are never small enough for the structure
            pieces.append(Piece(piece.file, start, piece.offset, piece.checks))
            start += piece.size
        return tuple(pieces)


def _attributes(node: Any) -> tuple[str, str]:
    """Return the kind and role of a group or dataset."""
    return str(node.attrs["kind"]), str(node.attrs.get("role", ""))


def _container_type(group: h5py.Group, kind: str) -> ContainerType | None:
    """Return the type of a group's container; older versions did not save it."""
    if "type" not in group.attrs:
        return None
    name, details = json.loads(group.attrs["type"])
    # Only types from our own table: a file cannot name a class to be made.
    if FAMILIES.get(name) != kind.removesuffix(" of int"):
        raise ValueError(f"group {group.name!r} is a {kind} with type {name!r}")
    if not all(type(text) is str for text in details):
        raise ValueError(f"group {group.name!r} has type {name!r} with {details!r}")
    if name == "state_dict" and type(json.loads(details[0])) is not dict:
        raise ValueError(f"group {group.name!r} has no versions of modules")
    return ContainerType(name, tuple(details))


def _original(
    dataset: h5py.Dataset, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    text = dataset.attrs.get("dtype")
    # Objects would be pickles or references: none is ever read.
    if dtype.hasobject:
        raise ValueError(f"dataset {dataset.name!r} has dtype {dtype}")
    return (dtype, shape) if text is None else original_dtype(str(text), dtype, shape)


def _dtype_and_shape(
    dataset: h5py.Dataset,
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape of the array that the dataset stores."""
    if dataset.shape is None:
        return np.dtype(np.uint8), (0,)
    if dataset.attrs["kind"] in STORED_AS_TEXT and dataset.dtype.kind == "S":
        return np.dtype(np.uint8), (dataset.dtype.itemsize,)
    return _original(dataset, dataset.dtype, dataset.shape)


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


def load(
    extended: StrategyExtended,
    operation: str,
    directory: Path,
    shared: Sequence[Leaf],
    own: Sequence[Leaf],
) -> dict[int, Any]:
    """Return the arrays of leaves by `id(leaf)`. Collective.

    Args:
      extended: whose ranks read.
      operation: the public call, for messages.
      directory: of the files.
      shared: leaves that all ranks need, equal on all ranks.
      own: leaves that only this rank needs.

    Raises, on all ranks:
      CheckpointError: a file cannot be read, or is damaged.
    """
    rank, ranks = extended.replica_id, extended.num_replicas
    values: dict[int, Any] = {}
    for leaf in shared:
        # Rank r reads every ranks-th piece and broadcasts it: each byte is read once
        # per job.
        pieces = [p for i, p in enumerate(leaf.pieces) if i % ranks == rank]
        read = functools.partial(_read, directory, leaf, pieces)
        # A piece that this rank cannot read is an error on all, before any broadcast.
        array, flat = extended.consensus.guard(operation, read)
        for i, piece in enumerate(leaf.pieces if ranks > 1 else ()):
            _broadcast(extended, operation, flat, piece, i % ranks)
        values[id(leaf)] = array

    def read_own() -> dict[int, Any]:
        found = {}
        for leaf in own:
            found[id(leaf)], _ = _read(directory, leaf, leaf.pieces)
        return found

    return values | extended.run_collectively(
        CallSignature(operation), read_own, yield_cpu=True
    )


def _read(directory: Path, leaf: Leaf, pieces: Sequence[Piece]) -> tuple[Any, Any]:
    """Return a new array for a leaf and its bytes, after reading some pieces."""
    array = np.empty(leaf.shape, leaf.dtype)
    flat = array.reshape(-1).view(np.uint8)
    for piece in pieces:
        _read_piece(directory, piece, flat[piece.start : piece.start + piece.size])
    return array, flat


def _broadcast(
    extended: StrategyExtended, operation: str, flat: Any, piece: Piece, root: int
) -> None:
    """Broadcast the bytes of a piece from the rank that read it. Collective."""
    end = piece.start + piece.size
    for start in range(piece.start, end, _MESSAGE_BYTES):
        part = flat[start : min(start + _MESSAGE_BYTES, end)]
        part[...] = extended.collectives.broadcast(operation, part, root)


def _read_piece(directory: Path, piece: Piece, into: Any) -> None:
    """Fill a buffer with the bytes of a piece.

    Raises:
      CheckpointError: they cannot be read, or a checksum differs.
    """
    start = 0
    with open_file(directory / piece.file) as descriptor:
        for size, crc32 in piece.checks:
            block = into[start : start + size]
            checked_read(descriptor, piece.offset + start, block, crc32)
            start += size
