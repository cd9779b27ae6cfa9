"""Restoring the state of objects from a checkpoint. Collective."""

from __future__ import annotations

import collections
import copy
import dataclasses
import pathlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn

import numpy as np

from mpidist.checkpoint.reading import load, read_tree
from mpidist.checkpoint.state import (
    GENERATOR,
    OBJECT,
    Write,
    checked_state,
    conflicts,
    derived_state,
    fresh_generator,
    identity,
    is_generator,
    memory_of,
    read_state,
    require_strategy,
    set_state,
    state_methods,
    write_state,
    write_to,
)
from mpidist.checkpoint.tree import (
    DEEPEST,
    LEAF_KINDS,
    METADATA,
    Group,
    Leaf,
    Node,
    Path,
    Tracked,
    as_name,
    children_of,
    decode,
    is_container,
    keep_versions,
    leaves,
    readable,
    scalar_kind,
    versions_of,
)
from mpidist.comm.consensus.consensus import Consensus
from mpidist.context import enter
from mpidist.device import arrays
from mpidist.errors import CheckpointError, CollectiveError, RemoteError
from mpidist.options import VariableAggregation
from mpidist.strategy.assignment import share
from mpidist.strategy.strategy import Strategy
from mpidist.strategy.variables import Variable
from mpidist.util.dtypes import is_integer
from mpidist.util.logs import warn
from mpidist.util.representation import one_line
from mpidist.values import Mirrored, PerReplica

# Changes an object in place, or returns another one to replace it
Change = Callable[[], Any]
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)


class Deferred:
    """A value that is computed after arrays were read, before objects change."""

    def __init__(self, path: Path, function: Callable[[], Any]):
        self.path = path
        self._function = function
        self.value: Any = None

    def compute(self) -> None:
        """Compute the value."""
        self.value = self._function()


class RestorePlan:
    """Matches objects with the nodes of a checkpoint.

    Args:
      strategy: of the checkpoint.
      file: its path, for messages.
      is_partial: whether objects that the file lacks stay unchanged.
    """

    def __init__(self, strategy: Strategy, file: str, is_partial: bool):
        self._strategy = strategy
        self._file = file
        self._is_partial = is_partial
        self._is_local = False
        self.shared: list[Leaf] = []  # to be read for all ranks
        self.local: list[Leaf] = []  # to be read for this rank only
        self.values: dict[int, Any] = {}  # arrays that were read, by id(leaf)
        self.deferred: list[Deferred] = []
        # Those with set_state, and their new states
        self.objects: list[tuple[Path, Any, Deferred]] = []
        self.states: dict[int, Any] = {}  # copies of their present ones, by id
        # Objects that change in place, by id, with the first place where each stands
        self._first_places: dict[int, tuple[Any, Path, Node]] = {}
        # Arrays that change in place, and what replaces one that must not
        self._separated: list[tuple[Write, Deferred]] = []
        self.missing: list[str] = []
        self.unused: list[str] = []

    def match(self, value: Any, node: Node, path: Path = ()) -> Change:
        """Return the change that restores `value` from `node`.

        Raises:
          CheckpointError: they do not match.
        """
        owner = identity(value)
        if owner is None:
            return self._match(value, node, path)
        _, first, there = self._first_places.setdefault(id(owner), (owner, path, node))
        if first == path:
            return self._match(value, node, path)
        return self._match_again(value, node, path, first, there)

    def _match_again(
        self, value: Any, node: Node, path: Path, first: Path, there: Node
    ) -> Change:
        """Match an object that stands at another place, too: `first`, with `there`.

        It stays one object if its values at both places are the same. Else a container
        or generator is replaced here; other objects are refused.
        """
        is_same = self._defer(path, lambda: self._is_same(node, there))
        twin = _twin_of(value)
        if twin is not None:
            change = self._match(twin, node, path)
            return lambda: value if is_same.value else change()

        def require() -> None:
            if not is_same.value:
                raise CheckpointError(
                    f"{self._file}: {readable(first)} and {readable(path)} are one "
                    "object in this program, but differ in the checkpoint; create one "
                    "for each"
                )

        self._defer(path, require)
        return self._match(value, node, path)

    def _is_same(self, a: Node, b: Node) -> bool:
        if isinstance(a, Leaf) and isinstance(b, Leaf):
            if (a.kind, a.dtype, a.shape, a.type) != (b.kind, b.dtype, b.shape, b.type):
                return False
            values = [self.values.get(id(x), x.array) for x in (a, b)]
            if any(value is None for value in values):
                return True
            return np.array_equal(*map(arrays.value_bytes, values))
        if not (isinstance(a, Group) and isinstance(b, Group)):
            return False
        names = a.children.keys() & b.children.keys()
        # A RandomState has more than the bit generator that it shares with a Generator
        is_fit = list(a.children) == list(b.children) or a.role == GENERATOR
        return (
            is_fit
            and (a.kind, a.role, a.type) == (b.kind, b.role, b.type)
            and all(self._is_same(a.children[n], b.children[n]) for n in names)
        )

    def separate(self) -> None:
        """Find values that would overwrite each other, once they were read.

        Raises:
          CheckpointError: one of them cannot be put elsewhere.
        """
        fixed = [
            dataclasses.replace(write, path=(*path, *write.path))
            for path, value, new in self.objects
            for write in memory_of(value, new.value)
        ]
        plain = [write for write, _ in self._separated]
        for write, other in conflicts([*fixed, *plain]):
            write.has_conflict = True
            if write.is_fixed:
                raise CheckpointError(
                    f"{self._file}: {readable(other.path)} and {readable(write.path)} "
                    "share memory in this program, but differ in the checkpoint; "
                    "create an array for each"
                )
        for write, deferred in self._separated:
            if write.has_conflict:
                deferred.compute()

    def _match(self, value: Any, node: Node, path: Path) -> Change:
        # The order matters: several of these tests may hold for one value.
        if isinstance(value, Variable):
            return self._variable(value, node, path)
        if isinstance(value, PerReplica):
            return self._per_replica(value, node, path)
        if is_generator(value):
            return self._generator(value, node, path)
        if is_container(value) or isinstance(value, Tracked):
            is_plain = not isinstance(value, Tracked) and _is_plain(value)
            return (self._plain if is_plain else self._children)(value, node, path)
        if isinstance(value, Mirrored):
            return self._mirrored(value, node, path)
        if not isinstance(value, np.ndarray) and state_methods(value):
            return self._object(value, node, path)
        if scalar_kind(value):
            return self._plain(value, node, path)
        return self._array(value, node, path)

    def _variable(self, variable: Variable, node: Node, path: Path) -> Change:
        require_strategy(variable, path, self._strategy)
        # A MEAN of integers was saved as float64, since it need not be an integer.
        is_mean = variable.on_read and variable.aggregation is VariableAggregation.MEAN
        is_mean = is_mean and is_integer(variable.dtype)
        dtype = np.dtype(np.float64) if is_mean else variable.dtype
        leaf = self._array_leaf(node, path, dtype, variable.shape)
        new = self._defer(path, lambda: self._copy_of(variable, self._value(leaf)))

        # Called after all ranks have all values: from here on nothing may fail.
        def change() -> Variable:
            variable.replace_local(new.value)
            return variable

        return change

    def _copy_of(self, variable: Variable, value: Any) -> Any:
        """Return this replica's component of a variable of that value."""
        extended = self._strategy.extended
        replicas, replica = extended.num_replicas, extended.replica_id
        # This replica's share: the shares of all replicas add up to the saved total.
        if variable.on_read and variable.aggregation is VariableAggregation.SUM:
            value = share(value, replicas, replica)
        elif value.dtype != variable.dtype:  # a mean of integers
            total = np.rint(value * replicas).astype(variable.dtype)
            value = share(total, replicas, replica)
        return arrays.to_device_like(np.asarray(value), variable.local)

    def _array(self, value: Any, node: Node, path: Path) -> Change:
        array = arrays.to_array(value, readable(path))
        if isinstance(value, np.ndarray):
            array = value  # of any byte order
        leaf = self._array_leaf(node, path, array.dtype, tuple(array.shape))
        is_device = arrays.is_device_array(array)
        # Read-only or converted arrays cannot change in place: another one replaces
        # them.
        is_writable = is_device or array.flags.writeable

        def read() -> Any:
            return arrays.to_device_like(self._value(leaf), array)

        if not (is_writable and _is_view(array, value)):
            new = self._defer(path, lambda: arrays.like(read(), value))
            return lambda: new.value
        new = self._defer(path, read)

        write = write_to(array, path, lambda: np.asarray(self._value(leaf)))
        # Only for one that would overwrite an array at another place
        other = Deferred(path, lambda: arrays.like(new.value.copy(), value))
        self._separated.append((write, other))

        def change() -> Any:
            if write.has_conflict:
                return other.value
            array[...] = new.value
            return value

        return change

    def _mirrored(self, value: Mirrored, node: Node, path: Path) -> Change:
        array = value.values[0]
        leaf = self._array_leaf(node, path, array.dtype, tuple(array.shape))
        new = self._defer(path, lambda: arrays.to_device_like(self._value(leaf), array))
        return lambda: Mirrored((new.value,), value.replica_ids)

    def _generator(self, generator: Any, node: Node, path: Path) -> Change:
        rank = self._strategy.extended.replica_id
        # None: all ranks had the same state when they saved.
        states = self._states(node, path, GENERATOR)
        if states is None:
            read = self._decoded(node, path)
        elif rank < len(states):
            read = self._decoded(states[rank], path)
        # A rank that did not exist then derives a state from all saved ones.
        else:
            every = [self._decoded(state, path) for state in states]

            def read() -> Any:
                known = [state() for state in every]
                return derived_state(generator, known, rank)

        new = self._defer(path, lambda: checked_state(generator, read()))

        def change() -> Any:
            set_state(generator, new.value)
            return generator

        return change

    def _object(self, value: Any, node: Node, path: Path) -> Change:
        states = self._states(node, path, OBJECT)
        state = node if states is None else self._of_this_rank(states, path)
        self._need(state, is_local=states is not None)

        # With the classes of the object's present state: a file contains no code.
        def read() -> Any:
            now = self.states[id(value)]
            # A state that is a single number was wrapped in a tuple.
            if isinstance(state, Group) and state.role == f"{OBJECT} of one":
                return decode(state, self.values, (now,))[0]
            return decode(state, self.values, now)

        new = self._defer(path, read)
        self.objects.append((path, value, new))
        return lambda: value

    def _states(self, node: Node, path: Path, role: str) -> list[Node] | None:
        """Return the states of all ranks; None if one node is the state of all."""
        if isinstance(node, Group) and node.kind == "ranks":
            states = list(node.children.values())
        else:
            states = [node]
        for state in states:
            roles = role, f"{role} of one"
            if not isinstance(state, Group) or state.role not in roles:
                self._fail(path, f"the state of a {role}", node)
        return None if states[0] is node else states

    def _of_this_rank(self, states: list[Node], path: Path) -> Node:
        extended = self._strategy.extended
        # A user's object cannot be divided: the number of ranks must be that of the
        # save.
        if len(states) != extended.num_replicas:
            raise CheckpointError(
                f"{self._file}: {readable(path)} was saved by {len(states)} ranks, "
                f"each with its own state; this job has {extended.num_replicas} ranks"
            )
        return states[extended.replica_id]

    def _per_replica(self, value: PerReplica, node: Node, path: Path) -> Change:
        if not isinstance(node, Group) or node.kind != "ranks":
            self._fail(path, "a value for each rank", node)
        node_of_rank = self._of_this_rank(list(node.children.values()), path)
        # Below here leaves are this rank's own, and not broadcast to others.
        self._is_local = True
        try:
            change = self.match(value.values[0], node_of_rank, path)
        finally:
            self._is_local = False

        def change_component() -> PerReplica:
            new = change()
            is_same = new is value.values[0]
            return value if is_same else PerReplica((new,), value.replica_ids)

        return change_component

    def _children(self, value: Any, node: Node, path: Path) -> Change:
        children = children_of(value, path) or {}
        is_dict = isinstance(value, Mapping | Tracked)
        kinds = ("dict", "dict of int") if is_dict else ("list", "tuple")
        if isinstance(node, Leaf) and node.family in kinds:
            self._fail(path, f"{len(children)} elements of several types", node)
        if not isinstance(node, Group) or node.kind not in kinds or node.role:
            self._fail(path, f"a {kinds[0]}", node)
        if not is_dict and len(children) != len(node.children):
            self._fail(path, f"{len(children)} elements", node)
        changes = {}
        for name, child in children.items():
            if name in node.children:
                below = (*path, name)
                changes[name] = self.match(child, node.children[name], below)
            elif self._is_partial:
                self.missing.append(readable((*path, name)))
            else:
                self._fail((*path, name), _describe_value(child), None)
        extra = [name for name in node.children if name not in children]
        self.unused += [readable((*path, name)) for name in extra]
        versions = versions_of(node)

        def change() -> Any:
            new = change_children(value, changes)
            _reorder(new, node.names)
            if versions is not None and isinstance(new, collections.OrderedDict):
                setattr(new, METADATA, versions)
            return new

        return change

    def _plain(self, value: Any, node: Node, path: Path) -> Change:
        """Match numbers and text, or a nest of them, which is replaced as a whole."""
        is_one = isinstance(node, Leaf) and not node.family and node.kind != "array"
        is_fit = value is None or (
            _is_same_container(value, node) if is_container(value) else is_one
        )
        # A state of an object never becomes a plain value by accident.
        is_own_state = isinstance(node, Group) and (node.role or node.kind == "ranks")
        if not is_fit or is_own_state:
            self._fail(path, _describe_value(value), node)
        if value and is_container(value):  # an empty one accepts arrays, too
            for below, leaf in leaves(node, path):
                if leaf.kind == "array":
                    self._fail(below, "a number or text", leaf)
        new = self._defer(path, self._decoded(node, path, self._is_local, value))
        return lambda: update_in_place(value, new.value)

    def _decoded(
        self, node: Node, path: Path, is_local: bool = False, similar: Any = None
    ) -> Callable[[], Any]:
        # Registered now, read after all objects have matched.
        self._need(node, is_local)
        return lambda: decode(node, self.values, similar)

    def _array_leaf(
        self, node: Node, path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> Leaf:
        """Return the leaf of an array, and register it to be read."""
        expected = f"an array of {dtype} {shape}"
        if not isinstance(node, Leaf) or not LEAF_KINDS[node.kind].is_array:
            self._fail(path, expected, node)
        if (node.dtype, node.shape) != (dtype, shape):
            self._fail(path, expected, node)
        self._need(node, self._is_local)
        return node

    def _need(self, node: Node, is_local: bool) -> None:
        if isinstance(node, Group):
            for child in node.children.values():
                self._need(child, is_local)
        elif node.pieces:
            (self.local if is_local else self.shared).append(node)

    def _value(self, leaf: Leaf) -> Any:
        return self.values[id(leaf)] if leaf.pieces else leaf.array

    def _defer(self, path: Path, function: Callable[[], Any]) -> Deferred:
        deferred = Deferred(path, function)
        self.deferred.append(deferred)
        return deferred

    def _fail(self, path: Path, expected: str, node: Node | None) -> NoReturn:
        raise CheckpointError(
            f"{self._file}: {readable(path)}: expected {expected}, found "
            f"{_describe(node)}"
        )


def _twin_of(value: Any) -> Any:
    """Return another object to restore a second place to; None if there can be none."""
    if is_generator(value):
        return fresh_generator(value, 0)
    is_known = isinstance(value, dict | list | collections.deque)
    return copy.copy(value) if is_known else None


def _describe(node: Node | None) -> str:
    if node is None:
        return "nothing with that name in the file"
    if isinstance(node, Leaf):
        return LEAF_KINDS[node.kind].shown.format(node)
    if node.kind == "ranks":
        return f"states of {len(node.children)} ranks"
    if node.role:
        return f"the state of a {node.role.removesuffix(' of one')}"
    return f"a {node.kind} of {len(node.children)} elements"


def _describe_value(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"an array of {value.dtype} {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _is_plain(value: Any, depth: int = 0) -> bool:
    if not is_container(value):
        return bool(scalar_kind(value))
    elements = value.values() if isinstance(value, Mapping) else value
    return depth < DEEPEST and all(_is_plain(x, depth + 1) for x in elements)


def _is_same_container(value: Any, node: Node) -> bool:
    families = ("dict",) if isinstance(value, Mapping) else ("list", "tuple")
    return node.family in families


def _is_view(array: Any, value: Any) -> bool:
    """Return whether writing to `array` changes `value`."""
    is_copy = isinstance(value, np.generic | Mirrored) or arrays.is_lazy(value)
    return array is value or not is_copy


def update_in_place(value: Any, new: Any) -> Any:
    """Make `value` equal to `new` and return it; return `new` where it cannot be."""
    if isinstance(value, MutableMapping) and isinstance(new, Mapping):
        for key in list(value):  # to get the new order; and Counter.update would add
            del value[key]
        for key, child in new.items():
            value[key] = child
        keep_versions(new, value)
        return value
    is_sequence = isinstance(new, list | tuple | collections.deque)
    if isinstance(value, list) and is_sequence:
        value[:] = new
        return value
    if isinstance(value, collections.deque) and is_sequence:
        value.clear()
        value.extend(new)
        return value
    if hasattr(value, "_fields") and type(new) is tuple:  # saved by an older version
        return type(value)(*new) if len(new) == len(value._fields) else new
    return new


def _reorder(value: Any, names: Sequence[str]) -> None:
    """Give a dict of Python the order of these names; other keys come last."""
    if type(value) not in _DICTS or not names:
        return
    keys = {as_name(key, ()): key for key in value}
    order = [keys.pop(name) for name in names if name in keys]
    order += keys.values()
    if list(value) != order:
        for key in order:
            value[key] = value.pop(key)


def change_children(value: Any, changes: Mapping[str, Change]) -> Any:
    """Apply changes to the children of a container; return it, or a new one."""
    if isinstance(value, Tracked):
        change_children(value.objects, changes)
        return value
    if isinstance(value, Mapping):
        keys = {as_name(key, ()): key for key in value}
        new = {keys[name]: change() for name, change in changes.items()}
        same = all(new[key] is value[key] for key in new)
        if same or isinstance(value, MutableMapping):
            for key, child in new.items():
                if child is not value[key]:
                    value[key] = child  # type: ignore[index]  # it is mutable
            return value
        return type(value)({**value, **new})  # type: ignore[call-arg]  # as tf.nest's
    made = [changes[str(i)]() if str(i) in changes else x for i, x in enumerate(value)]
    if all(a is b for a, b in zip(made, value, strict=True)):
        return value
    if isinstance(value, list | collections.deque):
        for i, child in enumerate(made):
            value[i] = child
        return value
    return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)


class LoadStatus:
    """The result of `Checkpoint.restore`. Its methods do not communicate.

    Args:
      path: the path of the checkpoint; None if there was none.
      missing: objects that the file did not have.
      unused: names in the file for which there was no object.
    """

    def __init__(
        self, path: str | None, missing: Sequence[str] = (), unused: Sequence[str] = ()
    ):
        self.path = path
        self.missing = tuple(missing)
        self.unused = tuple(unused)

    def __repr__(self) -> str:
        def describe() -> str:
            return (
                f"{self.path}, {len(self.missing)} missing, {len(self.unused)} unused"
            )

        return one_line(self, describe)

    def assert_consumed(self) -> LoadStatus:
        """Raise a CheckpointError unless objects and file had the same names.

        Returns itself, like the other methods.
        """
        self.assert_existing_objects_matched()
        if self.unused:
            raise CheckpointError(
                f"{self.path} has names that match no object: {', '.join(self.unused)}"
            )
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Raise a CheckpointError unless all objects were restored."""
        if self.path is None:
            raise CheckpointError("no checkpoint was given, so nothing was restored")
        if self.missing:
            raise CheckpointError(
                f"{self.path} lacks some objects, which are unchanged: "
                f"{', '.join(self.missing)}"
            )
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Raise a CheckpointError if there was no checkpoint."""
        if self.path is None:
            raise CheckpointError("no checkpoint was given, so nothing was restored")
        return self

    def run_restore_ops(self, session: Any = None) -> None:
        """Do nothing, as in TensorFlow's eager execution: all is restored.

        Raises:
          CheckpointError: no checkpoint was given.
        """
        self.assert_nontrivial_match()

    def initialize_or_restore(self, session: Any = None) -> None:
        """Do nothing: objects that were not restored keep their values."""

    def expect_partial(self) -> LoadStatus:
        """Return itself: there are no warnings about unused names."""
        return self


def restore(
    strategy: Strategy,
    operation: str,
    index: pathlib.Path,
    tracked: Tracked,
    is_partial: bool,
) -> RestorePlan:
    """Restore the state of objects. Collective.

    Args:
      strategy: whose ranks restore.
      operation: the public call, for messages.
      index: the checkpoint's file, the same on all ranks.
      tracked: the objects.
      is_partial: whether objects that the file lacks stay unchanged.

    Raises, on all ranks, without changes:
      CheckpointError: the file is missing or damaged, or does not match an object.
      MismatchError: the ranks restore different objects.
      What `set_state` of an object raises on any rank.
    """
    extended = strategy.extended
    consensus = extended.consensus
    # Rank 0 reads the structure for all: the metadata of a file is read once per job,
    # and an error of it is raised on all ranks.
    tree = consensus.root_only(operation, lambda: read_tree(index))
    plan = RestorePlan(strategy, str(index), is_partial)

    # Ranks whose objects differ would read different arrays, and wait for each other.
    def needed(_: Change) -> list[tuple[str, Any]]:
        leaves = [(leaf.kind, str(leaf.dtype), leaf.shape) for leaf in plan.shared]
        return [("the arrays to restore", tuple(leaves))]

    # Nothing is changed yet: `match` only plans, and its errors are raised on all
    # ranks.
    change = consensus.run(operation, plan.match, tracked, tree, same=needed)
    plan.values = load(extended, operation, index.parent, plan.shared, plan.local)
    with enter(strategy):
        _get_states(consensus, operation, plan)
    # All that may still fail is computed before the first object changes; after this
    # all ranks have all new values.
    consensus.run(operation, _compute, plan, index)
    # set_state of a user's object may fail, so these come before our own changes.
    with enter(strategy):
        _set_states(consensus, operation, plan)
    change()
    return plan


def _compute(plan: RestorePlan, index: pathlib.Path) -> None:
    """Compute all new values: what changes the objects afterwards cannot fail."""
    # Errors of decoding name file and object; those of the checkpoint do so already.
    for deferred in plan.deferred:
        try:
            deferred.compute()
        except CheckpointError:
            raise
        except Exception as error:
            where = f"{index}: {readable(deferred.path)}"
            raise CheckpointError(f"{where}: {error or repr(error)}") from error
    plan.separate()


def _get_states(consensus: Consensus, operation: str, plan: RestorePlan) -> None:
    """Keep copies of the present states of all objects. Collective."""
    if not plan.objects:
        return

    # Deep copies: set_state may change what get_state has returned.
    def get_states() -> dict[int, Any]:
        objects = {id(value): value for _, value, _ in plan.objects}
        return {i: copy.deepcopy(read_state(value)) for i, value in objects.items()}

    plan.states = consensus.run(operation, get_states)


def _set_states(consensus: Consensus, operation: str, plan: RestorePlan) -> None:
    """Call `set_state` of all objects; undo all calls if one raises. Collective."""
    for i, (path, value, new) in enumerate(plan.objects):
        where = f"{operation} of {readable(path)}"
        try:
            consensus.run(where, write_state, value, new.value)
        # Undo on all ranks: every rank is in the same call of `run`.
        except Exception:
            _restore_states(consensus, operation, plan, i + 1)
            raise


def _restore_states(
    consensus: Consensus, operation: str, plan: RestorePlan, count: int
) -> None:
    """Give the first objects their earlier states, the last one first. Collective."""
    for path, value, _ in reversed(plan.objects[:count]):
        where = f"{operation} of {readable(path)}"
        try:
            consensus.run(where, write_state, value, plan.states[id(value)])
        # One that refuses must not keep the others from theirs.
        except Exception as error:
            is_of_ranks = isinstance(error, CollectiveError)
            if is_of_ranks and not isinstance(error, RemoteError):
                raise
            warn(f"{where}: the object refused its earlier state, too: {error!r}")
