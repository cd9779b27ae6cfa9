"""The state of a user's objects: get it as nodes, gather it from all ranks, set it.

Reading the state of an object can communicate, so all ranks do it in the same order.
Objects with state have `get_state` and `set_state`, or PyTorch's `state_dict`. PyTorch
is not imported here: a program with such objects has imported it.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import hashlib
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from mpidist.checkpoint.tree import (
    LEAF_KINDS,
    METADATA,
    NDARRAY,
    TENSOR,
    Group,
    Leaf,
    Link,
    Nodes,
    Path,
    Tracked,
    Typed,
    as_name,
    cannot_save,
    encode,
    encode_node,
    is_container,
    keep_versions,
    leaf_of_array,
    numbers_kind,
    readable,
    walk,
)
from mpidist.device import arrays
from mpidist.errors import ArgumentTypeError, CheckpointError, ContextError
from mpidist.strategy.extended import StrategyExtended
from mpidist.strategy.strategy import Strategy
from mpidist.strategy.variables import Variable
from mpidist.util import nest, validation
from mpidist.values import DistributedValues, Mirrored, PerReplica

OBJECT, GENERATOR, VARIABLE = "object", "generator", "variable"
Digests = dict[Path, tuple[bytes, int]]


class WrittenThrough(dict[str, Any]):
    """A dict whose changes are passed on, to where its values come from.

    Args:
      items: its content.
      write: called with name and value of each change.
    """

    def __init__(self, items: Mapping[str, Any], write: Callable[[str, Any], None]):
        super().__init__(items)
        self._write = write

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._write(name, value)


class Attributes(Tracked):
    """The members of an object, or of a container, that have state.

    Of an object these are attributes without "_" that are variables, checkpoints,
    arrays, values with a state of their own, or hold such themselves.

    Args:
      owner: the object, a list, a tuple or a dict.
      above: the objects that it is a member of, which are not looked at again.
    """

    def __init__(self, owner: Any, above: tuple[Any, ...] = ()):
        self.owner = owner
        # Objects on the way from the root: a circle would be endless.
        self._above = (*above, owner)
        self._members = members_of(owner)
        children = {key: self.child(member) for key, member in self._members.items()}
        self.children = {k: child for k, child in children.items() if child is not None}

    @property
    def objects(self) -> dict[str, Any]:
        """The members that have state by name, or position."""
        keys = {_name_in(self.owner, key): key for key in self.children}

        def write(name: str, value: Any) -> None:
            if isinstance(value, Attributes):
                return  # its members are written, where they are
            if is_container(self.owner):
                self.owner[keys[name]] = value
            else:
                try:
                    setattr(self.owner, name, value)
                except AttributeError:  # a frozen dataclass, whose arrays change, too
                    vars(self.owner)[name] = value

        named = {name: self.children[key] for name, key in keys.items()}
        return WrittenThrough(named, write)

    def kinds(self, path: Path = ()) -> Iterator[tuple[Path, bool]]:
        """Yield the paths of numbers, and of what has state; and whether it has."""
        for key, member in self._members.items():
            child, below = self.children.get(key), (*path, _name_in(self.owner, key))
            if isinstance(child, Attributes):
                yield from child.kinds(below)
            elif child is not None:
                for place, value in walk(child, below):
                    if numbers_kind(value):
                        yield from (((*place, str(i)), True) for i in range(len(value)))
                    elif not is_container(value) and not isinstance(value, Tracked):
                        yield place, True
            elif isinstance(member, bool | int | float | complex | np.generic):
                yield below, False

    def require_kinds(self, before: Mapping[Path, bool]) -> dict[Path, bool]:
        """Raise if a number has become an array or other state, or the reverse.

        Args:
          before: what they were; see `kinds`.

        Returns:
          What they are now, and those of `before` that are no more.

        Raises:
          ArgumentTypeError: one has; a new job could not restore it.
        """
        now = dict(self.kinds())
        for path, had_state in before.items():
            if now.get(path) == had_state:
                continue
            value = self._at(path)
            if value is None or (self.child(value) is not None) == had_state:
                continue
            is_now, was = (("is not", "was"), ("is", "was not"))[not had_state]
            raise ArgumentTypeError(
                f"{readable(path)} of root {was} saved before, but {is_now} any more: "
                f"it has become {validation.shown(value)}. Of the attributes of an "
                "object, a Checkpoint saves arrays and other state, but no numbers: "
                "keep its type (root.x[...] = value), or give it by name"
            )
        return {**now, **before}

    def _at(self, path: Path) -> Any:
        """Return the member at a path, or what stands in its way; None if nothing."""
        value = self.owner
        for name in path:
            if not is_container(value) and not has_attributes(value):
                return value
            members = members_of(value)
            named = {_name_in(value, key): member for key, member in members.items()}
            value = named.get(name)
        return value

    def child(self, value: Any) -> Any:
        """Return what a checkpoint saves of a member; None for one without state."""
        is_value = isinstance(value, DistributedValues | Tracked) or is_generator(value)
        if is_value or state_methods(value) or _is_array(value):
            return value
        if any(value is other for other in self._above):
            return None
        if not is_container(value) and not has_attributes(value):
            return None
        # What has no state is left out; numbers alone are no state of a model.
        made = Attributes(value, self._above)
        if not made.children:
            return None
        is_nested = any(
            isinstance(child, Attributes) for child in made.children.values()
        )
        return made if is_nested or not is_container(value) else value


def members_of(owner: Any) -> dict[Any, Any]:
    """Return the members of an object or container by attribute, key or position."""
    if isinstance(owner, Mapping):
        return dict(owner)
    if is_container(owner):
        return dict(enumerate(owner))
    return {name: x for name, x in vars(owner).items() if not name.startswith("_")}


def _name_in(owner: Any, key: Any) -> str:
    return as_name(key, ()) if is_container(owner) else str(key)


def has_attributes(value: Any) -> bool:
    """Return whether `value` is an object whose attributes may have state."""
    is_code = isinstance(value, type | types.ModuleType) or inspect.isroutine(value)
    is_own = type(value).__module__.partition(".")[0] == "mpidist"
    return hasattr(value, "__dict__") and not (is_code or is_own)


def _is_array(value: Any) -> bool:
    if isinstance(value, np.generic | type):
        return False
    is_other = hasattr(value, "__dlpack__") or arrays.is_jax_array(value)
    return isinstance(value, np.ndarray) or is_other


def identity(value: Any) -> Any:
    """Return the object that a restore changes in place; None if there is none.

    Arrays are not told by identity but by their memory: see `Write`.
    """
    if isinstance(value, Attributes):
        return value.owner
    if isinstance(value, np.random.Generator):
        return value.bit_generator  # which two generators may share
    if isinstance(value, np.random.RandomState):
        return value._bit_generator
    if isinstance(value, Mirrored | np.ndarray):
        return None
    kinds = (Variable, Tracked, MutableMapping, list, collections.deque)
    is_changed = isinstance(value, kinds) or is_generator(value)
    return value if is_changed or state_methods(value) else None


@dataclasses.dataclass(frozen=True)
class PerRankState:
    """A state that can differ between ranks; the nodes are of this rank.

    Args:
      nodes: by their paths in the whole state.
      is_shared: whether to save one state for all ranks if all are equal.
    """

    nodes: Nodes
    is_shared: bool


def nodes_of(objects: Mapping[str, Any], strategy: Strategy) -> Nodes:
    """Return the nodes of all objects, with a `PerRankState` for each. Collective.

    Raises:
      ArgumentTypeError: a value that cannot be saved.
      ContextError: a variable of another strategy.
      What reading the state of an object raises.
    """
    nodes: Nodes = {}
    for path, value in walk(dict(objects)):
        if is_container(value):
            node: Group | Leaf | PerRankState = encode_node(value, path)
        elif isinstance(value, Tracked):
            node = Group("dict")
        elif isinstance(value, Variable):
            node = _variable_leaf(value, path, strategy)
        elif isinstance(value, PerReplica):
            node = PerRankState(encode(value.values[0], path), is_shared=False)
        elif is_generator(value):
            node = PerRankState(_nodes_of_state(state_of(value), GENERATOR, path), True)
        elif not isinstance(value, Mirrored | np.ndarray) and state_methods(value):
            node = PerRankState(_nodes_of_state(read_state(value), OBJECT, path), True)
        else:
            node = encode_node(value, path)
        nodes[path] = node
    return nodes


# Of a state these would come back as plain arrays: without units, not as bytes
_ALIKE = (np.ndarray, bytearray, memoryview, array.array)


def _nodes_of_state(state: Any, role: str, path: Path) -> Nodes:
    nodes = encode(state, path)
    for place, value in walk(state, path):
        if isinstance(value, _ALIKE) and type(value) not in (np.ndarray, np.memmap):
            raise cannot_save(value, place)
    if isinstance(nodes[path], Leaf):  # such as one number: a group has the role
        group = Group("tuple", role=role + " of one")
        return {path: group, (*path, "0"): nodes[path]}
    return {**nodes, path: dataclasses.replace(nodes[path], role=role)}


def _variable_leaf(variable: Variable, path: Path, strategy: Strategy) -> Leaf:
    """Return the leaf of a variable's value. Collective if it is ON_READ."""
    require_strategy(variable, path, strategy)
    # ON_READ: the value over all replicas, which takes a collective; else the local
    # copy.
    value = variable.value() if variable.on_read else variable.local
    leaf = leaf_of_array(value, path)
    # Variables replace their arrays instead of changing them, so no copy is needed.
    return dataclasses.replace(leaf, role=VARIABLE, is_frozen=True)


def require_strategy(variable: Variable, path: Path, strategy: Strategy) -> None:
    """Raise if a variable belongs to another strategy than the checkpoint."""
    if variable.distribute_strategy is not strategy:
        raise ContextError(
            f"{readable(path)} is a variable of {variable.distribute_strategy!r}, but "
            f"the checkpoint belongs to {strategy!r}: Mixing different "
            "tf.distribute.Strategy objects; create the variable in the strategy's "
            "scope"
        )


def strategy_of(value: Any) -> Strategy | None:
    """Return the strategy of the first variable or distributed iterator, if any."""
    for _, leaf in walk(value):
        if isinstance(leaf, Variable):
            return leaf.distribute_strategy
        strategy = getattr(leaf, "distribute_strategy", None)  # of a model
        if isinstance(strategy, Strategy):
            return strategy
        plan = getattr(leaf, "_plan", None)
        extended = getattr(plan, "extended", None)
        if extended is not None and isinstance(extended.strategy, Strategy):
            return extended.strategy
    return None


def require_saveable(value: Any, name: str) -> None:
    """Raise an ArgumentTypeError for classes and functions."""
    if isinstance(value, type) or (callable(value) and not state_methods(value)):
        raise ArgumentTypeError(
            f"{name!r} is {validation.shown(value)}, which has no state to save"
        )


_PYTHONS = "random.Random"


def is_generator(value: Any) -> bool:
    """Return whether `value` is a random generator of NumPy or of Python."""
    return isinstance(value, np.random.Generator | np.random.RandomState) or (
        type(value) is random.Random
    )


def state_of(generator: Any) -> dict[str, Any]:
    """Return the state of a generator."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return {
            "bit_generator": _PYTHONS,
            "version": version,
            "numbers": np.array(numbers, np.uint32),
            "gauss": gauss,
        }
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    return dict(generator.bit_generator.state)


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a generator.

    Raises: ValueError, TypeError, KeyError, ...: not a state of its kind.
    """
    if isinstance(generator, random.Random):
        numbers = tuple(int(number) for number in state["numbers"])
        generator.setstate((state["version"], numbers, state["gauss"]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def checked_state(generator: Any, state: Any) -> Any:
    """Return `state` if it is valid for this kind of generator.

    Raises:
      ValueError: it is not.
    """
    kind = state_of(generator)["bit_generator"]
    saved_kind = state.get("bit_generator") if isinstance(state, dict) else None
    if saved_kind != kind:
        raise ValueError(f"expected a state of {kind}, found one of {saved_kind}")
    try:
        trial = fresh_generator(generator, 0)
        set_state(trial, state)
        state_of(trial)
    except Exception as error:  # a bit generator of another library may raise anything
        raise ValueError(f"the state of {kind} is damaged: {error!r}") from error
    return state


def derived_state(generator: Any, states: Sequence[Any], rank: int) -> Any:
    """Return the state for a new rank, seeded by all saved states and the rank.

    It is reproducible, and differs between ranks.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for state in states:
        hashed.update(_text(state).encode())
    return state_of(
        fresh_generator(generator, int.from_bytes(hashed.digest(), "big"), rank)
    )


def _text(state: Any) -> str:
    if isinstance(state, dict):
        return repr([(key, _text(state[key])) for key in sorted(state)])
    return state.tobytes().hex() if isinstance(state, np.ndarray) else repr(state)


def fresh_generator(generator: Any, *seeds: int) -> Any:
    """Return a new generator of the same kind."""
    if isinstance(generator, random.Random):
        return random.Random(repr(seeds))
    seed = np.random.SeedSequence(seeds)
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(type(generator._bit_generator)(seed))
    return np.random.Generator(type(generator.bit_generator)(seed))


_PAIRS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def state_methods(value: Any) -> tuple[str, str] | None:
    """Return the methods of `value` that read and write a state; None if none do."""
    if isinstance(value, type):
        return None
    for pair in _PAIRS:
        if all(callable(getattr(value, name, None)) for name in pair):
            return pair
    return None


def read_state(value: Any) -> Any:
    """Return the state of an object: a nest of arrays, numbers and text."""
    if state_methods(value) == _PAIRS[0]:
        return value.get_state()
    state = value.state_dict()
    return _map(_to_typed, state) if _is_of_torch(value, state) else state


def _map(fn: Callable[[Any], Any], state: Any) -> Any:
    made = nest.map_leaves(fn, state)
    keep_versions(state, made)
    return made


def write_state(value: Any, state: Any) -> None:
    """Set the state of an object, as returned by `read_state`.

    Raises:
      CheckpointError: a name, shape or dtype does not match.
      What `set_state` or `load_state_dict` raises.
    """
    is_typed = any(isinstance(leaf, Typed) for leaf in nest.flatten(state)[0])
    if state_methods(value) == _PAIRS[0]:
        value.set_state(_map(_to_plain, state) if is_typed else state)
        return
    now = value.state_dict()
    if is_typed or _is_of_torch(value, now):
        state = _map(_from_typed, state)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.nn.Module):
            state = _renamed(state, now)
            _check_overflow(now, state)
    try:
        value.load_state_dict(state)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"the state does not match: {error}") from error


def memory_of(value: Any, state: Any) -> Iterator[Write]:
    """Yield what `write_state` writes into memory that it does not choose.

    That is, into the tensors of a PyTorch module, which other places may share.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return
    if isinstance(state, dict):
        state = _renamed(state, value.state_dict())
    named = {"remove_duplicate": False}
    for name, tensor in [
        *value.named_parameters(**named),
        *value.named_buffers(**named),
    ]:
        new = _to_plain(state.get(name)) if isinstance(state, dict) else None
        is_plain = not torch.nn.parameter.is_lazy(tensor) and (
            type(tensor.detach()) is torch.Tensor and tensor.layout is torch.strided
        )
        if not is_plain or not isinstance(new, np.ndarray) or not tensor.data_ptr():
            continue
        shape, item_bytes = tuple(tensor.shape), tensor.element_size()
        if (new.shape, new.itemsize) == (shape, item_bytes):
            strides = tuple(step * item_bytes for step in tensor.stride())
            address = tensor.data_ptr()
            yield Write(
                (name,),
                functools.partial(_as_stored, tensor, new),
                address,
                shape,
                strides,
                item_bytes,
                True,
            )


def _as_stored(tensor: Any, new: Any) -> Any:
    """Return values as the memory of a tensor holds them, which may have lazy bits."""
    values = np.conj(new) if tensor.is_conj() else np.asarray(new)
    return -values if tensor.is_neg() else values


def _renamed(state: Any, now: Any) -> Any:
    """Return a module's state by the names of `now`, which may be wrapped otherwise.

    DistributedDataParallel begins names with "module."; torch.compile puts "_orig_mod."
    before those of what it has compiled.
    """
    if state.keys() == now.keys():
        return state
    names = {_unwrapped(name): name for name in now}
    saved = {_unwrapped(name): name for name in state}
    if names.keys() != saved.keys() or len(names) < len(now) or len(saved) < len(state):
        return state  # the error names what is missing
    made = type(state)((name, state[saved[plain]]) for plain, name in names.items())
    versions = getattr(state, METADATA, None)
    if versions is not None:
        here = {_unwrapped(name): name for name in getattr(now, METADATA, {})}
        renamed = {
            here.get(_unwrapped(n), n): version for n, version in versions.items()
        }
        setattr(made, METADATA, renamed)
    return made


def _unwrapped(name: str) -> str:
    plain = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(plain[1:] if plain[:1] == ["module"] else plain)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_of_torch(value: Any, state: Any) -> bool:
    """Return whether the arrays of a state are tensors; a new optimizer has none."""
    bases = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    is_of_torch = "torch" in bases and "torch" in sys.modules
    return is_of_torch or any(map(_is_tensor, nest.flatten(state)[0]))


def _to_typed(leaf: Any) -> Any:
    """Return a tensor as an array that shares its memory, if it is in C order."""
    if _is_tensor(leaf):
        return Typed(arrays.to_array(leaf.detach().contiguous()), TENSOR)
    return Typed(leaf, NDARRAY) if _is_plain_array(leaf) else leaf


def _from_typed(leaf: Any) -> Any:
    """Undo `_to_typed`, with a copy that no other code changes.

    Older versions did not save what an array was: most were tensors.
    """
    plain = _to_plain(leaf)
    if not _is_plain_array(plain):
        return leaf
    is_tensor = "torch" in sys.modules and getattr(leaf, "role", TENSOR) == TENSOR
    # An optimizer keeps it
    like = sys.modules["torch"].empty(0) if is_tensor else plain
    return arrays.like(plain.copy(), like)


def _to_plain(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, Typed) else leaf


def _is_plain_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or arrays.is_device_array(value)


def _check_overflow(now: Any, state: Any) -> None:
    """Raise unless two states of a module have the same names, shapes and dtypes.

    Extra states are the module's own. Of modules of another version, PyTorch decides:
    they may convert older states.
    """
    here, saved = (getattr(s, METADATA, {}) for s in (now, state))
    if any(here[name] != saved[name] for name in here.keys() & saved.keys()):
        return
    for what, names in (
        ("lacks", now.keys() - state.keys()),
        ("has names that the model lacks:", state.keys() - now.keys()),
    ):
        if names:
            raise CheckpointError(f"the checkpoint {what} {sorted(names)[:5]}")
    for name, tensor in now.items():
        if not _is_tensor(tensor) or name.rpartition(".")[2] == "_extra_state":
            continue
        saved_value = state[name]
        kinds = [
            (str(getattr(a, "dtype", type(a))), tuple(getattr(a, "shape", ())))
            for a in (tensor, saved_value)
        ]
        if kinds[0] != kinds[1]:
            (dtype, shape), (other, other_shape) = kinds
            raise CheckpointError(
                f"{name} is {dtype} of shape {shape}, and {other} of shape "
                f"{other_shape} in the checkpoint"
            )


def describe(node: Any, compares: bool) -> str:
    """Return what must be equal on all ranks.

    Args:
      node: of `nodes_of`.
      compares: whether values must be equal, too; one rank computes no checksums.
    """
    if isinstance(node, PerRankState):
        return "a state"
    if isinstance(node, Group):
        return repr(node.facts)
    text = f"{node.kind} {node.dtype} {node.shape} {node.type or ''}"
    # Frozen values belong to variables, which are equal by construction.
    if node.is_frozen or not compares or not node.size_bytes:
        return text
    return f"{text} {LEAF_KINDS[node.kind].compare(node.array)}"


def join_ranks(
    extended: StrategyExtended,
    operation: str,
    nodes: Nodes,
    digests: Digests,
    most_bytes: int,
) -> Nodes | None:
    """Replace each `PerRankState` by what the index has of it. Collective.

    Returns the nodes for this rank's shard; None if no states go to shards.

    Args:
      extended: whose ranks save.
      operation: the public call, for messages.
      nodes: of all objects; changed to what is equal on all ranks.
      digests: of each `PerRankState`; see `digest`.
      most_bytes: states of more bytes in total go to the shards; the index then has a
        `Link` for each.
    """
    gather = extended.consensus.gather_objects
    everyone = gather(operation, lambda: digests)
    # In the order of the dict, which is the same on all ranks.
    states = {path: nodes[path] for path in digests}
    unlike = []
    for path, state in states.items():
        if state.is_shared and len({of_rank[path] for of_rank in everyone}) == 1:
            nodes |= state.nodes  # equal on all ranks
        else:
            unlike.append(path)
            nodes[path] = Group("ranks")
    # Too much to send to rank 0: each rank writes its own.
    if sum(of_rank[path][1] for path in unlike for of_rank in everyone) > most_bytes:
        in_shard: Nodes = {}
        for path in unlike:
            ranks = range(extended.num_replicas)
            nodes |= {(*path, str(rank)): Link(rank) for rank in ranks}
            in_shard |= _below(path, extended.replica_id, states[path].nodes)
        return in_shard
    # Small: rank 0 writes all, and no shards are needed.
    if unlike:
        sent = gather(operation, lambda: [_to_send(states[p].nodes) for p in unlike])
        for rank, gathered in enumerate(sent):
            for path, received in zip(unlike, gathered, strict=True):
                nodes |= _below(path, rank, received)
    return None


def _below(path: Path, rank: int, nodes: Nodes) -> Nodes:
    return {(*path, str(rank), *p[len(path) :]): node for p, node in nodes.items()}


def digest(nodes: Nodes) -> tuple[bytes, int]:
    """Return a hash of a state, and the bytes of its arrays."""
    hashed, size_bytes = hashlib.blake2b(digest_size=16), 0
    for path, node in nodes.items():
        if isinstance(node, Group):  # types of containers count as well
            hashed.update(repr((path, node.facts)).encode())
            continue
        facts = path, node.kind, str(node.dtype), node.shape, node.type
        hashed.update(repr(facts).encode())
        if node.size_bytes:
            hashed.update(arrays.checksum(node.array).encode())
            size_bytes += node.size_bytes
    return hashed.digest(), size_bytes


def _to_send(nodes: Nodes) -> Nodes:
    """Return nodes with their arrays in host memory, to be pickled, which copies."""
    return {
        path: node
        if isinstance(node, Group)
        else dataclasses.replace(node, array=arrays.to_host(node.array), is_frozen=True)
        for path, node in nodes.items()
    }


@dataclasses.dataclass(eq=False)
class Write:
    """A value to be written into memory, which may stand at several places of a state.

    One array may stand there twice, or its views; a restore writes at each. Values
    that fit together keep the memory shared; one that would overwrite another needs
    memory of its own.

    Args:
      path: where in the state.
      value: returns the value, a NumPy array of the memory's shape and dtype.
      address, shape, strides, item_bytes: the memory, on the host or a GPU.
      is_fixed: whether the value cannot have other memory.
      has_conflict: whether it would overwrite another value.
    """

    path: Path
    value: Callable[[], Any]
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    is_fixed: bool = False
    has_conflict: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """The addresses of the first byte, and behind the last."""
        steps = [(n - 1) * step for n, step in zip(self.shape, self.strides)]
        first = self.address + sum(min(step, 0) for step in steps)
        end = self.address + sum(max(step, 0) for step in steps) + self.item_bytes
        return (first, end) if 0 not in self.shape else (first, first)

    def view(self, image: Any, start: int) -> Any:
        """Return the bytes of this memory in an image of the memory from `start` on."""
        shape, strides = (*self.shape, self.item_bytes), (*self.strides, 1)
        offset = self.address - start
        return np.ndarray(shape, image.dtype, image, offset, strides)


def write_to(array: Any, path: Path, value: Callable[[], Any]) -> Write:
    """Return the write of a value into a NumPy or CuPy array."""
    on_gpu = arrays.is_device_array(array)
    address = array.data.ptr if on_gpu else array.ctypes.data
    return Write(path, value, address, array.shape, array.strides, array.itemsize)


def conflicts(writes: Sequence[Write]) -> Iterator[tuple[Write, Write]]:
    """Yield each write that would overwrite a value, and the earlier write of that."""
    ranges = sorted((*w.bounds, i) for i, w in enumerate(writes))
    group: list[int] = []
    end = 0
    for first, last, i in ranges:
        if first >= end:
            yield from _simulate([writes[j] for j in sorted(group)])
            group = []
        if first < last:
            group.append(i)
            end = max(end, last)
    yield from _simulate([writes[j] for j in sorted(group)])


def _simulate(writes: Sequence[Write]) -> Iterator[tuple[Write, Write]]:
    """Do the writes in an image of the memory; yield those that conflict."""
    if len(writes) < 2:
        return
    start = min(write.bounds[0] for write in writes)
    size = max(write.bounds[1] for write in writes) - start
    image, is_written = np.zeros(size, np.uint8), np.zeros(size, np.bool_)
    done: list[Write] = []
    for write in writes:
        data = np.ascontiguousarray(write.value()).view(np.uint8)
        memory, before = write.view(image, start), write.view(is_written, start)
        data = data.reshape(memory.shape)
        if np.any(before & (memory != data)):
            # All of them together do; find one that does alone
            alone = (other for other in done[1:] if any(_simulate([other, write])))
            yield write, next(alone, done[0])
        else:
            memory[...] = data
            before[...] = True
            done.append(write)
