"""A tree as an HDF5 file: its structure, and where in the file the arrays go.

The datasets are contiguous, so what HDF5 calls a dataset is a range of the file. HDF5
writes the structure, to memory; the arrays are written past it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import h5py
import numpy as np

from mpidist.checkpoint.format import (
    LARGEST_STRUCTURE_BYTES,
    Image,
    block_bytes,
    dtype_text,
    stored_as,
)
from mpidist.checkpoint.tree import STORED_AS_TEXT, Group, Leaf, Path, leaves
from mpidist.data.hdf5.written_rows import escape_source
from mpidist.errors import CheckpointError

__all__ = ["BLOCK_BYTES", "Link", "Plan", "Split", "lay_out"]

# Arrays up to this size are checked with the structure; larger ones in blocks
INLINE_BYTES = 32 << 10
BLOCK_BYTES = 16 << 20
_ALIGNMENT = 4096
_LIBVER = ("v108", "v110")  # what HDF5 1.10 can read


@dataclasses.dataclass(frozen=True)
class Split:
    """An array of which shards have parts, one after the other.

    Args:
      leaf: the whole array.
      parts: name of the shard, first element, element after the last one.
    """

    leaf: Leaf
    parts: tuple[tuple[str, int, int], ...]


@dataclasses.dataclass(frozen=True)
class Link:
    """A node that is in a shard, under the same name."""

    file: str


@dataclasses.dataclass
class Plan:
    """What has to be written.

    Args:
      image: all but the arrays of `data`.
      header_bytes: the length of the header, which is not in the image.
      data: offsets and arrays of bytes, in the order of the file.
    """

    image: Image
    header_bytes: int
    data: list[tuple[int, Any]]

    def blocks(self) -> Iterator[tuple[int, Any]]:
        """Yield offset and bytes of each block."""
        for offset, array in self.data:
            for start in range(0, array.nbytes, BLOCK_BYTES):
                yield offset + start, array[start : start + BLOCK_BYTES]


def lay_out(tree: Any, attributes: dict[str, Any], shards: Sequence[str] = ()) -> Plan:
    """Return where everything goes in a file of this tree.

    Args:
      tree: a Group of nodes, and of `Split` and `Link`.
      attributes: of the root, for humans.
      shards: the names of all shards, for whose checksums the header has room.

    Raises:
      CheckpointError: there are more small arrays and names than a file can have.
    """
    sizes = [leaf.size_bytes for _, leaf in leaves(_local(tree))]
    inline_bytes = _inline_bytes(sizes)
    blocks = sum(-(-size // BLOCK_BYTES) for size in sizes if size > inline_bytes)
    header_bytes = block_bytes(blocks, list(shards))
    image = Image()
    placed: list[tuple[int, Any]] = []
    with h5py.File(
        image,
        "w",
        libver=_LIBVER,
        userblock_size=header_bytes,
        alignment_threshold=inline_bytes,
        alignment_interval=_ALIGNMENT,
    ) as file:
        file.attrs.update(attributes)
        _Writer(file, placed).group(tree, ())
    plan = Plan(image, header_bytes, [])
    for offset, data in sorted(placed, key=lambda pair: pair[0]):
        if data.nbytes > inline_bytes:
            plan.data.append((offset, data))
        else:
            image.put(offset, data.tobytes())
    structure = image.size - sum(data.nbytes for _, data in plan.data)
    if structure > LARGEST_STRUCTURE_BYTES:
        raise CheckpointError(
            f"the names, numbers and small arrays of {len(sizes)} objects need "
            f"{structure} bytes, of at most {LARGEST_STRUCTURE_BYTES}; join small "
            "arrays"
        )
    image.compact()
    return plan


def _inline_bytes(sizes: Sequence[int]) -> int:
    """Return up to which size arrays are checked with the structure.

    Very many small ones are checked in blocks, too, as the structure is read at once.
    """
    small = sum(size for size in sizes if size <= INLINE_BYTES)
    return INLINE_BYTES if small <= LARGEST_STRUCTURE_BYTES // 2 else _ALIGNMENT


def _local(node: Any) -> Any:
    """Return a group with those nodes only whose bytes are in the file itself."""
    if not isinstance(node, Group):
        return node
    own = {
        name: _local(child)
        for name, child in node.children.items()
        if isinstance(child, Group | Leaf)
    }
    return Group(node.kind, own)


class _Writer:
    """Makes groups and datasets, and notes where the bytes of the latter belong."""

    def __init__(self, file: h5py.File, placed: list[tuple[int, Any]]):
        self._file = file
        self._placed = placed

    def group(self, group: Group, path: Path) -> None:
        made = self._file.require_group("/" + "/".join(path))
        _note(made, group.kind, group.role)
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
            else:
                target = "/" + "/".join(below)
                self._file[target] = h5py.ExternalLink(child.file, target)

    def _leaf(self, leaf: Leaf, path: Path) -> None:
        dataset = _contiguous(self._file, path, leaf)
        _note(dataset, leaf.kind, leaf.role, leaf.dtype)
        if leaf.size_bytes:
            flat = np.ascontiguousarray(leaf.array).reshape(-1)
            offset = dataset.id.get_offset()
            self._placed.append((offset, flat.view(np.uint8)))

    def _split(self, split: Split, path: Path) -> None:
        dtype, shape = stored_as(split.leaf.dtype, split.leaf.shape, "")
        inner = shape[len(split.leaf.shape) :]  # the characters of text
        layout = h5py.VirtualLayout(shape, dtype)
        target = "/" + "/".join(path)
        for file, start, stop in split.parts:
            names = escape_source(file), escape_source(target)
            source = h5py.VirtualSource(*names, (stop - start, *inner), dtype)
            first = 0
            for box in boxes(split.leaf.shape, start, stop):
                count = math.prod(part.stop - part.start for part in box)
                layout[box] = source[first : first + count]
                first += count
        dataset = self._file.create_virtual_dataset(target, layout)
        _note(dataset, split.leaf.kind, split.leaf.role, split.leaf.dtype)


def _contiguous(file: h5py.File, path: Path, leaf: Leaf) -> h5py.Dataset:
    """Create a dataset whose place in the file is known before it is written."""
    is_text = leaf.dtype == np.uint8 and leaf.kind in STORED_AS_TEXT
    if leaf.kind == "None" or (is_text and not leaf.size_bytes):
        space = h5py.h5s.create(h5py.h5s.NULL)
        dtype = np.dtype(np.int8)
    elif is_text:
        space = h5py.h5s.create(h5py.h5s.SCALAR)
        dtype = h5py.string_dtype("utf-8", leaf.size_bytes)
    else:
        dtype, shape = stored_as(leaf.dtype, leaf.shape, "")
        space = h5py.h5s.create_simple(shape)
    how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    how.set_layout(h5py.h5d.CONTIGUOUS)
    how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    kind = h5py.h5t.py_create(dtype, logical=True)
    name = ("/" + "/".join(path)).encode()
    return h5py.Dataset(h5py.h5d.create(file.id, name, kind, space, how))


def _note(made: Any, kind: str, role: str, dtype: np.dtype[Any] | None = None) -> None:
    made.attrs["kind"] = kind
    if role:
        made.attrs["role"] = role
    if dtype is not None and (text := dtype_text(dtype)):
        made.attrs["dtype"] = text


def boxes(
    shape: Sequence[int], start: int, stop: int, before: tuple[slice, ...] = ()
) -> Iterator[tuple[slice, ...]]:
    """Yield the hyperslabs that a range of an array's elements consists of, in order.

    Elements are counted in C order.
    """
    if len(shape) <= 1:
        yield (*before, slice(start, stop)) if shape else before
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows
    if first > last:
        within = slice(last, last + 1)
        skipped = last * inner
        yield from boxes(shape[1:], start - skipped, stop - skipped, (*before, within))
        return
    if start < first * inner:
        tail = (*before, slice(first - 1, first))
        yield from boxes(shape[1:], start - (first - 1) * inner, inner, tail)
    if first < last:
        yield (*before, slice(first, last), *(slice(0, n) for n in shape[1:]))
    if last * inner < stop:
        head = (*before, slice(last, last + 1))
        yield from boxes(shape[1:], 0, stop - last * inner, head)
