"""What all ranks save together: that it is the same, or whose it is. Collective."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import deflate
import numpy as np

from mpidist import arrays
from mpidist.agreement.calls import Call
from mpidist.checkpoint.layout import Link
from mpidist.checkpoint.names import Path, readable
from mpidist.checkpoint.objects import Own, tree_of
from mpidist.checkpoint.tree import TEXTS, Group, Leaf, Node, leaves
from mpidist.strategy import Strategy

__all__ = ["Collected", "collect"]

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
