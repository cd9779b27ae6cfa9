"""Which rank writes what: trees for the index and the shards, from what is collected.

Nothing here communicates; all ranks come to the same division.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import deflate
import numpy as np

from mpidist.checkpoint.layout import Link, Split
from mpidist.checkpoint.objects import Own, tree_of
from mpidist.checkpoint.tree import TEXTS, Group, Leaf, Node, Path, leaves, readable
from mpidist.comm.consensus.calls import Call
from mpidist.device import arrays
from mpidist.device.memory import Pinned
from mpidist.strategy.strategy import Strategy

__all__ = [
    "Assembled",
    "Collected",
    "Copies",
    "SMALLEST_SHARD_BYTES",
    "assemble",
    "collect",
    "cut",
    "shard_count",
]


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


_STEP_BYTES = 16 << 20  # that are copied from a GPU at a time


@dataclasses.dataclass(frozen=True)
class Collected:
    """What is saved.

    Args:
      tree: the same on all ranks: nodes, and `Link` where each has its own in a shard.
      own: this rank's nodes for its shard, as a tree; None if there are none.
    """

    tree: Group
    own: Group | None


def collect(
    strategy: Strategy,
    operation: str,
    objects: Mapping[str, Any],
    own_bytes: int,
    shard_names: Callable[[], list[str]],
) -> Collected:
    """Return the state of all objects. Collective.

    Args:
      strategy: whose ranks save.
      operation: the public call, for messages.
      objects: by name.
      own_bytes: what ranks have for themselves goes to their shards if it is more.
      shard_names: those of all ranks.

    Raises, on all ranks:
      MismatchError: arrays, numbers or text that differ between ranks.
      What `tree_of` raises on any rank.
    """
    agreement = strategy.extended.agreement
    with strategy.scope():
        tree = agreement.block(operation, lambda: tree_of(dict(objects), (), strategy))
    own = _find_own(tree)
    compares = strategy.extended.num_replicas > 1
    lines = agreement.prepare(operation, lambda: _describe(tree, compares))
    agreement.require_same(Call(operation, tuple(lines)))
    if not own:
        return Collected(tree, None)
    mine = {path: (_digest(o.node), _bytes(o.node)) for path, o in own.items()}
    everyone = agreement.gather(operation, mine)
    unlike = [
        path
        for path, found in own.items()
        if not found.is_shared or len({ranks[path][0] for ranks in everyone}) > 1
    ]
    chosen: dict[Path, Any] = {
        path: found.node for path, found in own.items() if path not in unlike
    }
    sizes = [sum(ranks[path][1] for path in unlike) for ranks in everyone]
    nodes = {path: _on_host(own[path].node) for path in unlike}
    if sum(sizes) > own_bytes:
        names = shard_names()
        for path in unlike:
            links: dict[str, Any] = {str(r): Link(n) for r, n in enumerate(names)}
            chosen[path] = Group("ranks", links)
        rank = str(strategy.extended.replica_id)
        return Collected(_fill_in(tree, chosen), _branches(nodes, rank))
    for path, found in _gather(strategy, operation, nodes).items():
        named = {str(rank): node for rank, node in enumerate(found)}
        chosen[path] = Group("ranks", named)
    return Collected(_fill_in(tree, chosen), None)


def _gather(
    strategy: Strategy, operation: str, nodes: dict[Path, Node]
) -> dict[Path, list[Node]]:
    """Return the nodes of all ranks. Collective if there are any."""
    if not nodes:
        return {}
    everyone = strategy.extended.agreement.gather(operation, nodes)
    return {path: [ranks[path] for ranks in everyone] for path in nodes}


def _find_own(node: Any, path: Path = ()) -> dict[Path, Own]:
    if isinstance(node, Own):
        return {path: node}
    found: dict[Path, Own] = {}
    if isinstance(node, Group):
        for name, child in node.children.items():
            found |= _find_own(child, (*path, name))
    return found


def _fill_in(node: Any, chosen: Mapping[Path, Any], path: Path = ()) -> Any:
    """Return the tree with the chosen nodes in place of `Own` ones."""
    if isinstance(node, Own):
        return chosen[path]
    if not isinstance(node, Group):
        return node
    children = {n: _fill_in(c, chosen, (*path, n)) for n, c in node.children.items()}
    return dataclasses.replace(node, children=children)


def _branches(nodes: Mapping[Path, Node], rank: str) -> Group:
    """Return a tree with these nodes, each in a group of ranks, and nothing else."""
    root: dict[str, Any] = {}
    for path, node in nodes.items():
        at = root
        for name in path:
            at = at.setdefault(name, {})
        at[rank] = node

    def build(children: dict[str, Any]) -> Group:
        built = {n: build(c) if isinstance(c, dict) else c for n, c in children.items()}
        return Group("dict", built)

    return build(root)


def _describe(node: Any, compares: bool, path: Path = ()) -> list[tuple[str, str]]:
    """Say of every node what must be the same on all ranks, if there are others."""
    if isinstance(node, Own):
        return [(readable(path), "a state")]
    if isinstance(node, Leaf):
        return [(readable(path), _describe_leaf(node, compares))]
    lines = [(readable(path), node.kind if node.type is None else repr(node.type))]
    for name, child in node.children.items():
        lines += _describe(child, compares, (*path, name))
    return lines


def _describe_leaf(leaf: Leaf, compares: bool) -> str:
    text = f"{leaf.kind} {leaf.dtype} {leaf.shape}"
    if leaf.is_frozen or not leaf.size_bytes or not compares:
        return text
    if leaf.kind == "array" or leaf.kind in TEXTS:
        return f"{text} crc {_crc32(leaf.array):08x}"
    return f"{leaf.kind} {arrays.value_bytes(leaf.array).tobytes().hex()}"


def _crc32(array: Any) -> int:
    """Return the checksum of all values of an array."""
    found = 0
    for data in _steps(array):
        found = deflate.crc32(data, found)
    return found


def _steps(array: Any) -> Iterator[Any]:
    """Yield the bytes of an array's values, some at a time."""
    flat = array.reshape(-1)
    count = max(1, _STEP_BYTES // flat.dtype.itemsize)
    for start in range(0, flat.size, count):
        yield arrays.value_bytes(flat[start : start + count]).reshape(-1)


def _digest(node: Node) -> bytes:
    """Return a hash of all of a node."""
    hashed = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(node):
        hashed.update(repr((path, leaf.kind, str(leaf.dtype), leaf.shape)).encode())
        if leaf.size_bytes:
            for data in _steps(leaf.array):
                sums = deflate.crc32(data), deflate.adler32(data)
                hashed.update(repr(sums).encode())
    hashed.update(_kinds(node).encode())
    return hashed.digest()


def _kinds(node: Node) -> str:
    if isinstance(node, Leaf):
        return ""
    below = [_kinds(child) for child in node.children.values()]
    return repr((node.kind, node.role, node.type, below))


def _bytes(node: Node) -> int:
    return sum(leaf.size_bytes for _, leaf in leaves(node))


def _on_host(node: Node) -> Node:
    """Return a node with copies of its arrays in memory of the host."""
    if isinstance(node, Group):
        children = {name: _on_host(child) for name, child in node.children.items()}
        return dataclasses.replace(node, children=children)
    if node.array is None:
        return node
    copy = np.array(arrays.to_host(node.array), order="C")
    return dataclasses.replace(node, array=copy, is_frozen=True)


SMALLEST_SHARD_BYTES = 1 << 20
# A cut this close to the edge of an array is moved there
_SNAP_BYTES = 64 << 10


def shard_count(total_bytes: int, shard_bytes: int, ranks: int) -> int:
    """Return how many shards so many bytes are divided into; 1 for no division."""
    smallest = max(shard_bytes, SMALLEST_SHARD_BYTES)
    return max(1, min(ranks, total_bytes // smallest))


def is_divisible(size_bytes: int) -> bool:
    """Return whether an array is worth being divided."""
    return size_bytes >= SMALLEST_SHARD_BYTES


def cut(sizes: Sequence[tuple[int, int]], shards: int) -> list[list[int]]:
    """Return where arrays that lie one behind the other are cut, into equal shards.

    Args:
      sizes: each array's number of elements, and the bytes of an element.
      shards: how many.

    Returns:
      For each array `shards + 1` numbers of elements, ascending: shard s has those from
      the s-th to the one after it.
    """
    total = sum(count * item for count, item in sizes)
    cuts = []
    start = 0
    for count, item in sizes:
        edges = [
            _snap(total * s // shards - start, count * item) for s in range(shards)
        ]
        cuts.append([*(edge // item for edge in edges), count])
        start += count * item
    return cuts


def _snap(edge: int, size: int) -> int:
    if edge < _SNAP_BYTES:
        return 0
    return size if edge > size - _SNAP_BYTES else edge
