"""Which rank writes what, at which offset of its file: partition, layout, writing.

Datasets are contiguous, so each is a range of the file. HDF5 writes the structure to
an in-memory file; arrays are written directly to their ranges, which HDF5 has
allocated. Nothing here communicates: all ranks compute the same partition.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import h5py
import numpy as np

from mpidist.checkpoint.directory import lock
from mpidist.checkpoint.format import (
    LARGEST_STRUCTURE_BYTES,
    Header,
    InMemoryFile,
    checked_write,
    header_bytes,
    render,
    unwritable,
)
from mpidist.checkpoint.tree import (
    STORED_AS_TEXT,
    Group,
    Leaf,
    Node,
    Path,
    dtype_text,
    leaves,
    replace_nodes,
    stored_as,
    tree_of_nodes,
)
from mpidist.errors import CheckpointError
from mpidist.hdf5.shard_writer import escape_source
from mpidist.util.files import replace_file

__all__ = [
    "BLOCK_BYTES",
    "FileLayout",
    "Partition",
    "SMALLEST_SHARD_BYTES",
    "Split",
    "boxes",
    "cut",
    "lay_out",
    "make_partition",
    "shard_count",
    "write_file",
]


SMALLEST_SHARD_BYTES = 1 << 20
# Cuts this close to an edge of an array are moved to the edge
_SNAP_BYTES = 64 << 10


def shard_count(total_bytes: int, shard_bytes: int, ranks: int) -> int:
    """Return the number of shards for arrays of so many bytes; 1 for no shards."""
    # Shards of less than a megabyte cost more in metadata than they save.
    smallest = max(shard_bytes, SMALLEST_SHARD_BYTES)
    # No more shards than ranks: a rank writes at most one.
    return max(1, min(ranks, total_bytes // smallest))


def cut(sizes: Sequence[tuple[int, int]], shards: int) -> list[list[int]]:
    """Cut concatenated arrays into shards of equal size.

    Args:
      sizes: number of elements of each array, and bytes of an element.
      shards: number of shards.

    Returns:
      For each array, `shards + 1` ascending element numbers: shard s holds the elements
      from the s-th to the next.
    """
    total = sum(count * item for count, item in sizes)
    cuts = []
    start = 0
    # Shard boundaries are computed in bytes of all arrays, then rounded to elements.
    for count, item in sizes:
        edges = [
            _snap(total * s // shards - start, count * item) for s in range(shards)
        ]
        cuts.append([*(edge // item for edge in edges), count])
        start += count * item
    return cuts


def _snap(edge: int, size: int) -> int:
    # A sliver of an array in another shard would cost a file access to read.
    if edge < _SNAP_BYTES:
        return 0
    return size if edge > size - _SNAP_BYTES else edge


@dataclasses.dataclass(frozen=True)
class Split:
    """An array whose consecutive parts are in shards.

    Args:
      leaf: the whole array, without its values.
      parts: name of the shard, first element, end.
    """

    leaf: Leaf
    parts: tuple[tuple[str, int, int], ...]


Names = Callable[[int], list[str]]


@dataclasses.dataclass
class Partition:
    """What one rank writes. The trees are dropped once they are written.

    Args:
      index: the tree of the index, which rank 0 writes.
      shard: this rank's tree; None if it writes no shard.
      shard_names: of all shards, by rank; the first ranks write them.
    """

    index: Group | None
    shard: Group | None
    shard_names: Sequence[str]


def make_partition(
    tree: Group,
    own: Mapping[Path, Node] | None,
    *,
    rank: int,
    ranks: int,
    shard_bytes: int,
    names: Names,
) -> Partition:
    """Return what each rank writes.

    Args:
      tree: the state of all objects, see `gather_state`.
      own: this rank's nodes for its shard; None if there are none.
      rank: of this process.
      ranks: how many there are.
      shard_bytes: the least size of a shard.
      names: returns the names of so many shards.
    """
    large = {
        path: leaf
        for path, leaf in leaves(tree)
        if leaf.size_bytes >= SMALLEST_SHARD_BYTES
    }
    # Equal on all ranks, so all ranks find the same shards without exchanging them.
    total = sum(leaf.size_bytes for leaf in large.values())
    count = shard_count(total, shard_bytes, ranks)
    if count == 1:
        # One shard would only add a file: all arrays go into the index.
        if own is None:
            return Partition(tree, None, [])
        return Partition(tree, tree_of_nodes(own), names(ranks))
    # With per-rank states each rank has a shard, however small its part is.
    shard_names = names(count if own is None else ranks)
    sizes = [
        (x.size_bytes // x.dtype.itemsize, x.dtype.itemsize) for x in large.values()
    ]
    splits: dict[Path, Any] = {}
    own_nodes = dict(own or {})
    # Every rank computes the cuts of all, as rank 0 writes the virtual datasets.
    for (path, leaf), cuts in zip(large.items(), cut(sizes, count), strict=True):
        parts = zip(shard_names, cuts[:-1], cuts[1:], strict=False)
        splits[path] = Split(
            # The index holds where the parts are; only this rank's part keeps its
            # memory.
            dataclasses.replace(leaf, array=None),
            tuple((name, start, stop) for name, start, stop in parts if start < stop),
        )
        if rank < count and cuts[rank] < cuts[rank + 1]:
            own_nodes[path] = _part(leaf, cuts[rank], cuts[rank + 1])
    index = replace_nodes(tree, splits)
    return Partition(
        index, tree_of_nodes(own_nodes) if own_nodes else None, shard_names
    )


def _part(leaf: Leaf, start: int, stop: int) -> Leaf:
    """Return a range of an array's elements."""
    # A view: nothing is copied before it is written.
    flat = leaf.array.reshape(-1)[start:stop]
    return Leaf("array", leaf.dtype, (stop - start,), flat, is_frozen=leaf.is_frozen)


# Arrays up to this size are part of the structure; others have checksums per block
INLINE_BYTES = 32 << 10
BLOCK_BYTES = 16 << 20
_LARGE_BYTES = 64 << 20
_ALIGNMENT = 4096
_LIBVER = ("v108", "v110")  # what HDF5 1.10 can read


def write_file(
    path: FilePath,
    tree: Any,
    attributes: dict[str, Any],
    make_header: Callable[..., Header],
    shards: Sequence[str] = (),
    locks: list[int] | None = None,
) -> None:
    """Write a tree to a file, atomically.

    Args:
      path: of the file.
      tree: of nodes.
      attributes: of the root.
      make_header: called with size, checksum of the structure, and blocks.
      shards: names of the shards in the header.
      locks: a descriptor of the locked file is appended, for the caller to close.
    """
    plan = lay_out(tree, attributes, shards)
    with unwritable(path), replace_file(path) as file:
        descriptor = file.fileno()
        # Locked before the first byte, so that no other job takes it for a leftover.
        if locks is not None:
            lock(descriptor)
            # A second descriptor keeps the lock when the file is closed.
            locks.append(os.dup(descriptor))
        # Arrays first: the header needs their checksums
        data = tuple(
            (offset, block.nbytes, checked_write(descriptor, offset, block))
            for offset, block in plan.blocks()
        )
        # Structure is everything between the arrays: one checksum over its parts in
        # order.
        image, crc32 = plan.image, 0
        holes = [(offset, size) for offset, size, _ in data]
        for offset, part in image.solid(plan.header_bytes, holes):
            checked_write(descriptor, offset, part)
            crc32 = zlib.crc32(part, crc32)
        # The header holds all checksums, and how long the rest took, so it is written
        # last. Of a small file, what the disk takes does not count.
        if image.size > _LARGE_BYTES:
            os.fsync(descriptor)
        header = make_header(image.size, crc32, data)
        checked_write(descriptor, 0, render(header, plan.header_bytes))
        # Extend the file over bytes at its end that were never written.
        os.ftruncate(descriptor, image.size)


@dataclasses.dataclass
class FileLayout:
    """The content of a file.

    Args:
      image: everything except the header and the arrays of `data`.
      header_bytes: length of the header.
      data: offsets and arrays of bytes, in file order.
    """

    image: InMemoryFile
    header_bytes: int
    data: list[tuple[int, Any]]

    def blocks(self) -> Iterator[tuple[int, Any]]:
        """Yield offset and bytes of each block."""
        for offset, array in self.data:
            for start in range(0, array.nbytes, BLOCK_BYTES):
                yield offset + start, array[start : start + BLOCK_BYTES]


def lay_out(
    tree: Any, attributes: dict[str, Any], shards: Sequence[str] = ()
) -> FileLayout:
    """Lay out a tree in a file.

    Args:
      tree: a Group of nodes, `Split` and `Link`.
      attributes: of the root, for humans.
      shards: names of all shards, for which to reserve space in the header.

    Raises:
      CheckpointError: too many names and small arrays for one file.
    """
    sizes = [leaf.size_bytes for _, leaf in leaves(tree)]
    inline_bytes = _inline_bytes(sizes)
    # Counted before the layout, as the header precedes all blocks.
    blocks = sum(-(-size // BLOCK_BYTES) for size in sizes if size > inline_bytes)
    user_block_bytes = header_bytes(blocks, list(shards))
    # HDF5 writes into memory: its data structures, but none of the large arrays.
    image = InMemoryFile()
    placed: list[tuple[int, Any]] = []
    with h5py.File(
        image,
        "w",
        libver=_LIBVER,
        userblock_size=user_block_bytes,
        alignment_threshold=inline_bytes,
        alignment_interval=_ALIGNMENT,
    ) as file:
        file.attrs.update(attributes)
        _Writer(file, placed).group(tree, ())
    plan = FileLayout(image, user_block_bytes, [])
    # In the order of the file, so that the disk is written in one direction.
    for offset, data in sorted(placed, key=lambda pair: pair[0]):
        if data.nbytes > inline_bytes:
            # Large arrays are only noted; `write_file` streams them.
            plan.data.append((offset, data))
        else:
            image.put(offset, data.tobytes())
    # What a reader has to hold in memory before it can verify anything.
    structure = image.size - sum(data.nbytes for _, data in plan.data)
    if structure > LARGEST_STRUCTURE_BYTES:
        raise CheckpointError(
            f"the names, numbers and small arrays of {len(sizes)} objects need "
            f"{structure} bytes, but the limit is {LARGEST_STRUCTURE_BYTES}; join "
            "small arrays"
        )
    image.compact()
    return plan


def _inline_bytes(sizes: Sequence[int]) -> int:
    """Return the size up to which arrays are part of the structure.

    It is smaller for very many arrays, since the structure is read at once.
    """
    small = sum(size for size in sizes if size <= INLINE_BYTES)
    return INLINE_BYTES if small <= LARGEST_STRUCTURE_BYTES // 2 else _ALIGNMENT


class _Writer:
    """Creates groups and datasets, and records the offsets of their bytes."""

    def __init__(self, file: h5py.File, placed: list[tuple[int, Any]]):
        self._file = file
        self._placed = placed

    def group(self, group: Group, path: Path) -> None:
        made = self._file.require_group("/" + "/".join(path))
        _set_attributes(made, group.kind, group.role)
        if group.type is not None:
            made.attrs["type"] = json.dumps(group.type)
        for name, child in group.children.items():
            below = (*path, name)
            if isinstance(child, Group):
                self.group(child, below)
            elif isinstance(child, Leaf):
                self._leaf(child, below)
            elif isinstance(child, Split):
                self._split(child, below)
            # Per-rank state is in the shard, at the same path.
            else:
                target = "/" + "/".join(below)
                self._file[target] = h5py.ExternalLink(child.file, target)

    def _leaf(self, leaf: Leaf, path: Path) -> None:
        dataset = _contiguous(self._file, path, leaf)
        _set_attributes(dataset, leaf.kind, leaf.role, leaf.dtype)
        # Nothing to place for empty arrays: HDF5 gives them no address.
        if leaf.size_bytes:
            flat = np.ascontiguousarray(leaf.array).reshape(-1)
            # HDF5 has allocated the range already; its bytes are written past HDF5.
            offset = dataset.id.get_offset()
            self._placed.append((offset, flat.view(np.uint8)))

    def _split(self, split: Split, path: Path) -> None:
        dtype, shape = stored_as(split.leaf.dtype, split.leaf.shape, "")
        inner = shape[len(split.leaf.shape) :]  # the characters of str
        layout = h5py.VirtualLayout(shape, dtype)
        target = "/" + "/".join(path)
        for file, start, stop in split.parts:
            names = escape_source(file), escape_source(target)
            source = h5py.VirtualSource(*names, (stop - start, *inner), dtype)
            first = 0
            # A range of elements is several hyperslabs of a multidimensional array.
            for box in boxes(split.leaf.shape, start, stop):
                count = math.prod(part.stop - part.start for part in box)
                layout[box] = source[first : first + count]
                first += count
        dataset = self._file.create_virtual_dataset(target, layout)
        _set_attributes(dataset, split.leaf.kind, split.leaf.role, split.leaf.dtype)


def _contiguous(file: h5py.File, path: Path, leaf: Leaf) -> h5py.Dataset:
    """Create a contiguous dataset, whose range of the file is allocated at once."""
    is_text = leaf.dtype == np.uint8 and leaf.kind in STORED_AS_TEXT
    # A null dataspace: None, and empty text, have no bytes.
    if leaf.kind == "None" or (is_text and not leaf.size_bytes):
        space = h5py.h5s.create(h5py.h5s.NULL)
        dtype = np.dtype(np.int8)
    elif is_text:
        # Readable by other programs as text, with its length fixed.
        space = h5py.h5s.create(h5py.h5s.SCALAR)
        dtype = h5py.string_dtype("utf-8", leaf.size_bytes)
    else:
        dtype, shape = stored_as(leaf.dtype, leaf.shape, "")
        space = h5py.h5s.create_simple(shape)
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    # Contiguous, early, and never filled: HDF5 reserves the range and writes nothing.
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(dtype, logical=True)
    name = ("/" + "/".join(path)).encode()
    return h5py.Dataset(h5py.h5d.create(file.id, name, kind, space, how))


def _set_attributes(
    made: Any, kind: str, role: str, dtype: np.dtype[Any] | None = None
) -> None:
    made.attrs["kind"] = kind
    if role:
        made.attrs["role"] = role
    # Only dtypes that HDF5 does not give back as they were.
    if dtype is not None and (text := dtype_text(dtype)):
        made.attrs["dtype"] = text


def boxes(
    shape: Sequence[int], start: int, stop: int, before: tuple[slice, ...] = ()
) -> Iterator[tuple[slice, ...]]:
    """Yield the hyperslabs of a range of elements, in C order."""
    if len(shape) <= 1:
        yield (*before, slice(start, stop)) if shape else before
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    # The range is inside one row: go down one dimension.
    if first > last:
        within = slice(last, last + 1)
        skipped = last * inner
        yield from boxes(shape[1:], start - skipped, stop - skipped, (*before, within))
        return
    # The end of the row before the first whole one.
    if start < first * inner:
        tail = (*before, slice(first - 1, first))
        yield from boxes(shape[1:], start - (first - 1) * inner, inner, tail)
    # All whole rows in one hyperslab.
    if first < last:
        yield (*before, slice(first, last), *(slice(0, n) for n in shape[1:]))
    # The beginning of the row behind the last whole one.
    if last * inner < stop:
        head = (*before, slice(last, last + 1))
        yield from boxes(shape[1:], 0, stop - last * inner, head)
