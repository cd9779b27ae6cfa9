"""What all ranks save together: that it is the same, or whose it is. Collective."""

from __future__ import annotations

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import deflate
import numpy as np

from mpidist import arrays
from mpidist.agreement.calls import Call
from mpidist.checkpoint.layout import Link
from mpidist.checkpoint.names import Path, readable
from mpidist.checkpoint.objects import Own, tree_of
from mpidist.checkpoint.tree import Group, Leaf, Node, leaves
from mpidist.strategy import Strategy

__all__ = ["Collected", "collect"]

_SAMPLED_BYTES = 1 << 16


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
    lines = agreement.prepare(operation, lambda: _describe(tree))
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


def _describe(node: Any, path: Path = ()) -> list[tuple[str, str]]:
    """Say of every node what must be the same on all ranks."""
    if isinstance(node, Own):
        return [(readable(path), "a state")]
    if isinstance(node, Leaf):
        return [(readable(path), _describe_leaf(node))]
    lines = [(readable(path), node.kind)]
    for name, child in node.children.items():
        lines += _describe(child, (*path, name))
    return lines


def _describe_leaf(leaf: Leaf) -> str:
    text = f"{leaf.kind} {leaf.dtype} {leaf.shape}"
    if leaf.is_frozen or not leaf.size_bytes:
        return text
    if leaf.kind in ("array", "bytes", "str"):
        return f"{text} crc {_sample(leaf.array):08x}"
    return f"{leaf.kind} {leaf.array.tobytes().hex()}"


def _sample(array: Any) -> int:
    """Return a checksum of an array, or of evenly spaced elements of a large one."""
    flat = array.reshape(-1)
    step = max(1, flat.nbytes // _SAMPLED_BYTES)
    return zlib.crc32(np.ascontiguousarray(arrays.to_host(flat[::step])).tobytes())


def _digest(node: Node) -> bytes:
    """Return a hash of all of a node."""
    hashed = hashlib.blake2b(digest_size=16)
    for path, leaf in leaves(node):
        hashed.update(repr((path, leaf.kind, str(leaf.dtype), leaf.shape)).encode())
        if leaf.size_bytes:
            data = np.ascontiguousarray(arrays.to_host(leaf.array)).reshape(-1)
            sums = (
                deflate.crc32(data.view(np.uint8)),
                deflate.adler32(data.view(np.uint8)),
            )
            hashed.update(repr(sums).encode())
    hashed.update(_kinds(node).encode())
    return hashed.digest()


def _kinds(node: Node) -> str:
    if isinstance(node, Leaf):
        return ""
    return repr((node.kind, node.role, [_kinds(c) for c in node.children.values()]))


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
