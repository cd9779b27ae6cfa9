"""Read the files of a checkpoint as a tree.

The checksum of the structure is verified before HDF5 parses it. Large arrays are read
in pieces, each by one rank, which broadcasts it.
"""

from __future__ import annotations

import bisect
import dataclasses
import io
import json
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mpidist.checkpoint.format import (
    Header,
    MemoryFile,
    SparseFile,
    between,
    checked_read,
    damage,
    header_crc32,
    open_file,
    parse,
    read_header,
    read_header_bytes,
)
from mpidist.checkpoint.tree import (
    CONTAINERS,
    DEEPEST,
    LEAF_KINDS,
    ContainerType,
    Group,
    Leaf,
    Node,
    Piece,
    original_dtype,
)
from mpidist.errors import CheckpointError
from mpidist.hdf5.index import contiguous_offset
from mpidist.strategy.extended import StrategyExtended
from mpidist.util.dtypes import traits
from mpidist.util.files import read_fully

_GROUP_KINDS = ("dict", "dict of int", "list", "tuple", "ranks")
_DEEPEST = DEEPEST + 1  # with the ranks of a state
_MESSAGE_BYTES = 64 << 20


def read_tree(path: Path) -> Group:
    """Return the tree of a checkpoint, with large arrays as pieces of its files.

    Raises:
      CheckpointError: it is missing or damaged.
    """
    shards = {}
    for shard in read_header(path).shards:
        beside = path.with_name(shard.name)
        with damage(path):
            # A shard of another save may have taken its name
            if header_crc32(beside) != shard.crc32:
                raise ValueError(f"{shard.name} belongs to another checkpoint")
        shards[shard.name] = _read_file(beside, {})
    return _read_file(path, shards)


def _read_file(path: Path, shards: Mapping[str, Group]) -> Group:
    with open_file(path) as descriptor:
        # The header has a checksum of its own, and limits what is read after it.
        text = read_header_bytes(descriptor)
        header = parse(text)
        if {shard.name for shard in header.shards} != shards.keys():
            raise ValueError("it was replaced while it was read")
        image = _read_structure(descriptor, len(text), header)
        # HDF5 sees verified bytes in memory, and never the file itself.
        with h5py.File(image, "r") as file:
            return _Reader(file, path.name, header, image, shards).group(file, "")


def _read_structure(descriptor: int, start: int, header: Header) -> MemoryFile:
    """Read everything but header and large arrays, and verify its checksum."""
    # A file that was cut short, or grew, is damaged whatever its checksums say.
    size_now = os.fstat(descriptor).st_size
    if size_now != header.size:
        raise ValueError(f"it has {size_now} bytes instead of {header.size}")
    # Arrays are verified block by block when they are read; this is all the rest.
    holes = [(offset, size) for offset, size, _ in header.data]
    image, crc32 = SparseFile() if holes else io.BytesIO(), 0
    for offset, size in between(start, holes, header.size):
        data = read_fully(descriptor, size, offset)
        crc32 = zlib.crc32(data, crc32)
        image.seek(offset)
        image.write(data)
    # Verified before HDF5 parses it: damaged structures can crash HDF5.
    if crc32 != header.structure_crc32:
        raise ValueError("the checksum of its structure does not match")
    image.truncate(header.size)
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
        image: MemoryFile,
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
        container_type, keys = _container_type(group, kind.partition(" ")[0])
        names = list(group)  # in their order if HDF5 has kept it
        if keys and sorted(keys) != sorted(names):
            raise ValueError(f"the saved order of keys of {path!r} does not match")
        is_ordered = keys or group.id.get_create_plist().get_link_creation_order()
        names = keys or names
        # Lists have their order by number; HDF5 sorts names as text.
        if not kind.startswith("dict"):
            names = [str(i) for i in range(len(names))]
        children = {name: self._node(group, name, f"{path}/{name}") for name in names}
        order = tuple(names) if is_ordered else ()
        return Group(kind, children, role, container_type, order)

    def _node(self, group: h5py.Group, name: str, path: str) -> Node:
        link = group.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            return self._in_shard(link.filename, path)
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
        if kind not in LEAF_KINDS:
            raise ValueError(f"dataset {path!r} has kind {kind!r}")
        if _has_foreign_floats(dataset.id.get_type()):
            raise CheckpointError(
                f"{self._name}: {path.strip('/')!r} has long doubles of another kind "
                "of processor; convert them to float64 where they were saved"
            )
        read = self._split_leaf if dataset.is_virtual else self._plain_leaf
        leaf = read(dataset, path, kind, role)
        if leaf.family:
            return dataclasses.replace(
                leaf, type=_container_type(dataset, leaf.family)[0]
            )
        return leaf

    def _plain_leaf(
        self, dataset: h5py.Dataset, path: str, kind: str, role: str
    ) -> Leaf:
        dtype, shape = _dtype_and_shape(dataset)
        size = math.prod(shape) * dtype.itemsize
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
        self._image.seek(offset)
        data = bytearray(self._image.read(size) or b"")
        array = np.frombuffer(data, dtype).reshape(shape)
        return Leaf(kind, dtype, shape, array, (), role)

    def _claim(self, size: int, path: str, *, is_block: bool) -> None:
        if is_block:
            self._blocks_left -= size
        else:
            self._structure_left -= size
        if min(self._blocks_left, self._structure_left) < 0:
            raise ValueError(f"dataset {path!r} has more bytes than remain in the file")

    def _split_leaf(
        self, dataset: h5py.Dataset, path: str, kind: str, role: str
    ) -> Leaf:
        dtype, shape = _original(dataset, dataset.dtype, dataset.shape)
        pieces = self._pieces(path, dtype.itemsize)
        leaf = Leaf(kind, dtype, shape, None, pieces, role)
        size = sum(piece.size for piece in pieces)
        if size != leaf.size_bytes:
            raise ValueError(
                f"dataset {path!r} has {size} bytes instead of {leaf.size_bytes}"
            )
        return leaf

    def _in_shard(self, name: str, path: str) -> Node:
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


def _has_foreign_floats(kind: Any) -> bool:
    """Return whether a type of HDF5 has long doubles that this processor lacks.

    They may have as many bytes, so NumPy would take them for its own.
    """
    if isinstance(kind, h5py.h5t.TypeCompoundID):
        members = map(kind.get_member_type, range(kind.get_nmembers()))
        return any(map(_has_foreign_floats, members))
    if isinstance(kind, h5py.h5t.TypeArrayID):
        return _has_foreign_floats(kind.get_super())
    is_long = isinstance(kind, h5py.h5t.TypeFloatID) and kind.get_size() > 8
    return is_long and kind.get_fields() != h5py.h5t.NATIVE_LDOUBLE.get_fields()


def _attributes(node: Any) -> tuple[str, str]:
    return str(node.attrs["kind"]), str(node.attrs.get("role", ""))


def _container_type(
    node: h5py.Group | h5py.Dataset, family: str
) -> tuple[ContainerType | None, list[str]]:
    """Return the type of a container, and the keys that older versions saved with it.

    The oldest saved no type.
    """
    if "type" not in node.attrs:
        return None, []
    name, details = json.loads(node.attrs["type"])
    # Only types from our own table: a file cannot name a class to be made.
    if name not in CONTAINERS or CONTAINERS[name].family != family:
        raise ValueError(f"{node.name!r} is a {family} with type {name!r}")
    if not all(type(text) is str for text in details):
        raise ValueError(f"{node.name!r} has type {name!r} with {details!r}")
    if name == "state_dict" and type(json.loads(details[0])) is not dict:
        raise ValueError(f"{node.name!r} has no versions of modules")
    keys = details[name == "state_dict" :] if CONTAINERS[name].is_ordered else []
    return ContainerType(name, tuple(details[: len(details) - len(keys)])), keys


def _original(
    dataset: h5py.Dataset, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    text = dataset.attrs.get("dtype")
    # Objects would be pickles or references: none is ever read.
    if dtype.hasobject:
        raise ValueError(f"dataset {dataset.name!r} has dtype {dtype}")
    return (dtype, shape) if text is None else original_dtype(str(text), dtype, shape)


def _dtype_and_shape(dataset: h5py.Dataset) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if dataset.shape is None:
        return np.dtype(np.uint8), (0,)
    if (
        LEAF_KINDS[dataset.attrs["kind"]].is_text
        and traits(dataset.dtype).family == "bytes"
    ):
        return np.dtype(np.uint8), (dataset.dtype.itemsize,)
    return _original(dataset, dataset.dtype, dataset.shape)


def load(
    extended: StrategyExtended,
    operation: str,
    directory: Path,
    shared: Sequence[Leaf],
    local: Sequence[Leaf],
) -> dict[int, Any]:
    """Return the arrays of leaves by `id(leaf)`. Collective.

    Args:
      extended: whose ranks read.
      operation: the public call, for messages.
      directory: of the files.
      shared: leaves that all ranks need, equal on all ranks.
      local: leaves that only this rank needs.

    Raises, on all ranks:
      CheckpointError: a file cannot be read, or is damaged.
    """
    rank, ranks = extended.replica_id, extended.num_replicas

    # Rank r reads every ranks-th piece and broadcasts it: each byte is read once per
    # job. What one rank cannot read is an error on all, before any broadcast.
    def read() -> dict[int, Any]:
        values = {
            id(leaf): _read(directory, leaf, leaf.pieces[rank::ranks])
            for leaf in shared
        }
        return values | {
            id(leaf): _read(directory, leaf, leaf.pieces) for leaf in local
        }

    values = extended.consensus.run(operation, read, yield_cpu=True)
    for leaf in shared if ranks > 1 else ():
        flat = values[id(leaf)].reshape(-1).view(np.uint8)
        for i, piece in enumerate(leaf.pieces):
            _broadcast(extended, operation, flat, piece, i % ranks)
    return values


def _read(directory: Path, leaf: Leaf, pieces: Sequence[Piece]) -> Any:
    array = np.empty(leaf.shape, leaf.dtype)
    flat = array.reshape(-1).view(np.uint8)
    for piece in pieces:
        _read_piece(directory, piece, flat[piece.start : piece.start + piece.size])
    return array


def _broadcast(
    extended: StrategyExtended, operation: str, flat: Any, piece: Piece, root: int
) -> None:
    """Broadcast the bytes of a piece from the rank that read it. Collective."""
    end = piece.start + piece.size
    for start in range(piece.start, end, _MESSAGE_BYTES):
        part = flat[start : min(start + _MESSAGE_BYTES, end)]
        part[...] = extended.collectives.broadcast(operation, part, root)


def _read_piece(directory: Path, piece: Piece, into: Any) -> None:
    """Fill a buffer with the bytes of a piece."""
    start = 0
    with open_file(directory / piece.file) as descriptor:
        for size, crc32 in piece.checks:
            block = into[start : start + size]
            checked_read(descriptor, piece.offset + start, block, crc32)
            start += size
