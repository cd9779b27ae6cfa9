"""Which rank writes what: trees for the index and the shards, from what is collected.

Nothing here communicates; all ranks come to the same division.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.checkpoint.collecting import Collected
from mpidist.checkpoint.division import cut, is_divisible, shard_count
from mpidist.checkpoint.layout import Split
from mpidist.checkpoint.names import Path
from mpidist.checkpoint.tree import Group, Leaf, leaves
from mpidist.gpu.memory import Pinned

__all__ = ["Assembled", "Copies", "assemble"]

Names = Callable[[int], list[str]]


@dataclasses.dataclass(frozen=True)
class Assembled:
    """What the ranks write.

    Args:
      index: the tree of the index, whose arrays only rank 0 needs.
      shard: this rank's tree; None if it writes no shard.
      shard_names: of the ranks that write one, which are the first.
    """

    index: Group
    shard: Group | None
    shard_names: Sequence[str]


def assemble(
    collected: Collected, rank: int, ranks: int, shard_bytes: int, names: Names
) -> Assembled:
    """Divide what is collected.

    Args:
      collected: what is saved.
      rank: this one.
      ranks: how many there are.
      shard_bytes: arrays of more bytes together are divided into shards of as many.
      names: called with the number of shards; returns their names.
    """
    large = {p: x for p, x in leaves_of(collected.tree) if is_divisible(x.size_bytes)}
    total = sum(leaf.size_bytes for leaf in large.values())
    count = shard_count(total, shard_bytes, ranks)
    has_own = collected.own is not None
    shard_names = names(ranks if has_own else count) if has_own or count > 1 else []
    if count == 1:
        return Assembled(collected.tree, collected.own, shard_names)
    sizes = [
        (x.size_bytes // x.dtype.itemsize, x.dtype.itemsize) for x in large.values()
    ]
    cuts = dict(zip(large, cut(sizes, count), strict=True))
    splits = {
        path: Split(_without_array(leaf), _parts(shard_names, cuts[path]))
        for path, leaf in large.items()
    }
    mine = {
        path: _part(leaf, cuts[path][rank], cuts[path][rank + 1])
        for path, leaf in large.items()
        if rank < count and cuts[path][rank] < cuts[path][rank + 1]
    }
    shard = collected.own or Group("dict", {})
    for path, part in mine.items():
        shard = _insert(shard, path, part)
    index = _replace(collected.tree, splits)
    return Assembled(index, shard if shard.children else None, shard_names)


def leaves_of(node: Any, path: Path = ()) -> list[tuple[Path, Leaf]]:
    """Return the leaves of a tree that may hold links to shards, too."""
    if isinstance(node, Group):
        return [
            found
            for name, child in node.children.items()
            for found in leaves_of(child, (*path, name))
        ]
    return leaves(node, path) if isinstance(node, Leaf) else []


class Copies:
    """Copies of arrays on the host, in memory that is used again by the next ones."""

    def __init__(self) -> None:
        self._buffers: dict[Path, Any] = {}
        self._pinned: dict[Path, Pinned] = {}

    def of(self, tree: Group | None, is_needed_later: bool) -> Group | None:
        """Return a tree with its arrays on the host.

        Args:
          tree: what this rank writes.
          is_needed_later: whether arrays that may be changed in place are copied, too.
        """
        if tree is None:
            return None
        made: dict[Path, Leaf] = {}
        for path, leaf in leaves_of(tree):
            if leaf.array is not None:
                array = self._copy(path, leaf, is_needed_later)
                made[path] = dataclasses.replace(leaf, array=array, is_frozen=True)
        copied: Group = _replace(tree, made)
        return copied

    def _copy(self, path: Path, leaf: Leaf, is_needed_later: bool) -> Any:
        array = leaf.array
        if arrays.is_device_array(array):
            return self._fetch(path, array)
        if leaf.is_frozen or not is_needed_later:
            return array
        buffer = self._buffers.get(path)
        if buffer is None or (buffer.dtype, buffer.shape) != (array.dtype, array.shape):
            buffer = self._buffers[path] = np.empty(array.shape, array.dtype)
        np.copyto(buffer, array)
        return buffer

    def _fetch(self, path: Path, array: Any) -> Any:
        """Return a copy of an array of a GPU, in page-locked memory."""
        pinned = self._pinned.setdefault(path, Pinned())
        host = pinned.take(array.nbytes).view(array.dtype)
        if array.nbytes:
            arrays.namespace(array).ascontiguousarray(array).reshape(-1).get(out=host)
        return host.reshape(array.shape)


def _without_array(leaf: Leaf) -> Leaf:
    return dataclasses.replace(leaf, array=None)


def _parts(
    names: Sequence[str], cuts: Sequence[int]
) -> tuple[tuple[str, int, int], ...]:
    pairs = zip(names, cuts[:-1], cuts[1:], strict=False)
    return tuple((name, start, stop) for name, start, stop in pairs if start < stop)


def _part(leaf: Leaf, start: int, stop: int) -> Leaf:
    """Return some elements of an array."""
    flat = leaf.array.reshape(-1)[start:stop]
    return Leaf("array", leaf.dtype, (stop - start,), flat, is_frozen=leaf.is_frozen)


def _insert(group: Group, path: Path, node: Any) -> Group:
    """Return a tree of groups with one more node."""
    name, *rest = path
    below = group.children.get(name, Group("dict", {}))
    if rest:
        assert isinstance(below, Group)
        node = _insert(below, tuple(rest), node)
    return dataclasses.replace(group, children=group.children | {name: node})


def _replace(node: Any, others: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return a tree with other leaves at some paths."""
    if path in others:
        return others[path]
    if not isinstance(node, Group):
        return node
    children = {n: _replace(c, others, (*path, n)) for n, c in node.children.items()}
    return dataclasses.replace(node, children=children)
