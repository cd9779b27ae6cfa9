"""What collectives share: state, memory, and plans, made once for a kind of call.

A plan contains the signature that ranks compare, how to send the leaves, and how to
return the results. A call of a known kind uses its plan without further checks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm.collectives.arguments import check_each, to_arrays
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.shared_memory.symmetric import SymmetricMemory
from mpidist.comm.transports.selector import TransportSelector
from mpidist.device import arrays
from mpidist.device.copies import SmallCopies
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import nest, validation
from mpidist.util.available_memory import round_up
from mpidist.util.buffers import Buffers
from mpidist.values import Mirrored, PerReplica

OP_TYPES = (str, ReduceOp)  # any other type of reduce_op is an error
# So that a program whose shapes never repeat does not fill memory.
_MOST = 1000  # plans that are kept
_NUMBERS = {int, float, complex, np.float32, np.float64, np.complex64, np.complex128}
_INT_END = 1 << 63
_FLAT = (list, tuple)
_DISTRIBUTED = {PerReplica, Mirrored}
# Types and dtypes to which results can be converted
_tried: set[tuple[type, np.dtype[Any]]] = set()
Kind = Callable[[Any], Any]
Make = Callable[[], tuple[Any, Sequence[Any], Sequence[Any]]]
Execute = Callable[[Any, Sequence[Any]], list[Any]]


class Pack(NamedTuple):
    """Arrays that are sent and reduced as one.

    Args:
      members: their numbers among the arrays of the message.
      cuts: for each of them where it is in the pack, and its shape.
      size: how many elements they have.
      shape: `(size,)`, or that of the array if there is but one.
      dtype: in which they are added.
      out: of the results.
      scalars: how many have no dimensions; where they are packed, they are the last.
      transport: adds them; None if they travel with the comparison of the calls.
      wire: the dtype in which it sends them; None for their own.
    """

    members: Sequence[int]
    cuts: Sequence[tuple[slice, tuple[int, ...]]]
    size: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    out: np.dtype[Any]
    scalars: int
    transport: Any = None
    wire: np.dtype[Any] | None = None

    @classmethod
    def of(
        cls,
        members: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        dtype: np.dtype[Any],
        out: np.dtype[Any],
    ) -> Pack:
        """Return a pack of some of the arrays, whose shapes are given."""
        inside = [shapes[i] for i in members]
        ends = list(itertools.accumulate(map(math.prod, inside), initial=0))
        cuts = list(zip(map(slice, ends, ends[1:]), inside))
        shape = inside[0] if len(members) == 1 else (ends[-1],)
        return cls(members, cuts, ends[-1], shape, dtype, out, inside.count(()))

    def fill(self, page: Any, leaves: Sequence[Any]) -> None:
        """Write the leaves into `page`, an array of this dtype and shape."""
        members, scalars = self.members, self.scalars
        if len(members) == 1:
            page[...] = leaves[members[0]]
            return
        if scalars < len(members):
            # One call for all arrays, whose cost is per call rather than per byte.
            rows = [leaves[i].reshape(-1) for i in members[: len(members) - scalars]]
            out = page[: self.size - scalars]
            np.concatenate(rows, out=out, casting="same_kind")
        for position in range(-scalars, 0):
            page[position] = leaves[members[position]]

    def take_apart(self, total: Any, results: list[Any]) -> None:
        """Put each array of a pack into `results`, as a view."""
        if len(self.members) == 1:
            results[self.members[0]] = total.reshape(self.shape)
            return
        for i, (cut, shape) in zip(self.members, self.cuts):
            results[i] = total[cut].reshape(shape)


class Message(NamedTuple):
    """Arrays as packs, and results as a nest like the user's.

    Args:
      spec: the structure of the first value of a plan. Later ones may have the keys of
        a mapping in another order: such specs are equal.
      kind: list, tuple or dict if its members are the leaves, None if it is the only
        leaf, else `nest.Spec`.
      names: of a dict, in its own order, with the numbers of the leaves.
      foreign: the numbers of the leaves that are no arrays of NumPy.
      sends: the dtypes in which the arrays are passed to a transport.
      out: the dtypes of the results.
      narrow: the numbers of the arrays whose result is narrower than their total.
      packs: of all arrays.
      has_flag: whether integers may overflow. Then the number of ranks with large
        ones is summed as another, last array.
    """

    spec: Any = None
    kind: type | None = None
    names: Mapping[Any, int] = MappingProxyType({})
    foreign: Sequence[int] = ()
    sends: Sequence[np.dtype[Any]] = ()
    out: Sequence[np.dtype[Any]] = ()
    narrow: Sequence[int] = ()
    packs: Sequence[Pack] = ()
    has_flag: bool = False

    @classmethod
    def of(cls, spec: nest.Spec, leaves: Sequence[Any]) -> Message:
        """Return the message of a flattened value, without packs."""
        foreign = [i for i, a in enumerate(leaves) if type(a) is not np.ndarray]
        if spec.type is None:
            return cls(spec, None, {}, foreign)
        # The common nests, flat ones, are rebuilt without optree.
        count = len(leaves)
        is_flat = spec.num_children == count and spec.num_nodes == count + 1
        if not is_flat or spec.type not in (*_FLAT, dict):
            return cls(spec, nest.Spec, {}, foreign)
        names = nest.unflatten(spec, range(count)) if spec.type is dict else {}
        return cls(spec, spec.type, names, foreign)

    def try_out(self, leaves: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Raise if results cannot have the leaf types: the ranks have not agreed yet.

        Args:
          leaves: of the value.
          inputs: the leaves as arrays.
        """
        for i in self.foreign:
            array, kind = inputs[i], (type(leaves[i]), inputs[i].dtype)
            if kind not in _tried and isinstance(array, np.ndarray):
                arrays.like(np.zeros((1,) * array.ndim, array.dtype), leaves[i])
                if len(_tried) < _MOST:
                    _tried.add(kind)

    def unflatten_results(
        self, results: list[Any], leaves: Sequence[Any], spec: nest.Spec | None = None
    ) -> Any:
        """Return results with the structure and the leaf types of the value.

        Args:
          results: NumPy or CuPy arrays.
          leaves: of the value.
          spec: of the value; None if it has no mappings, or is the plan's first.
        """
        # Results are NumPy arrays; leaves of another library get theirs back.
        for i in self.foreign:
            results[i] = arrays.like(results[i], leaves[i])
        if self.kind is None:
            return results[0]
        if self.kind in _FLAT:
            return results if self.kind is list else tuple(results)
        if self.kind is dict and spec is None:
            return {name: results[i] for name, i in self.names.items()}
        return nest.unflatten(self.spec if spec is None else spec, results)


class PlanCache:
    """The plans of one strategy, by the kinds of calls."""

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._known: dict[Any, Any] = {}
        self._names: dict[tuple[Any, ...], Sequence[str]] = {}

    def find(
        self, operation: str, detail: Any, value: Any, kind: Kind
    ) -> tuple[Any, Any, Sequence[Any], nest.Spec | None]:
        """Return a call's key, plan, leaves, and the spec for `unflatten_results`.

        The key is None if type and shape of the leaves do not determine the result.
        Then, and for a new key, there is no plan.

        Args:
          operation: the public call that this is.
          detail: its other arguments; hashable.
          value: a nest; components of distributed values are its leaves.
          kind: what leaves with the same plan have in common; None if that is unknown.
        """
        # Of a distributed value this rank has one component.
        if type(value) in _DISTRIBUTED:
            value = value.values[0]
        # The cheapest lookup comes first: one array costs no tuple of kinds.
        if type(value) is np.ndarray:
            is_whole = kind is kind_of
            array_kind = (value.dtype, value.shape) if is_whole else kind(value)
            key = None if array_kind is None else (operation, detail, array_kind)
            return key, self._known.get(key), (value,), None
        structure: Any = type(value)
        if structure in _FLAT:
            leaves, kinds = _kinds_of(value, kind)
            # A leaf of unknown kind is converted each time, so a plan cannot be
            # looked up.
            if None not in kinds:
                key = operation, detail, (structure, kinds)
                return key, self._known.get(key), leaves, None
        if structure is dict and (names := self._sorted(order := tuple(value))):
            leaves, kinds = _kinds_of(map(value.__getitem__, names), kind)
            if None not in kinds:
                key = operation, detail, (order, kinds)
                return key, self._known.get(key), leaves, None
        leaves, spec = nest.flatten(value)
        leaves, kinds = _kinds_of(leaves, kind)
        if None in kinds:
            return None, None, leaves, spec
        key = operation, detail, (spec, kinds)
        return key, self._known.get(key), leaves, spec

    def _sorted(self, names: tuple[Any, ...]) -> Sequence[str]:
        """Return the keys of a dict in the order of its leaves; none if no text."""
        if (found := self._names.get(names)) is None:
            are_texts = all(type(name) is str for name in names)
            found = sorted(names) if are_texts else ()
            if len(self._names) < _MOST:
                self._names[names] = found
        return found

    def keep(
        self, key: Any, plan: Any, leaves: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        """Use a plan for calls with this key from now on.

        Not if leaves have to be converted each time, as arrays of swapped bytes have.
        """
        # Plans take leaves as they are. An array that had to be converted is no proof
        # that the next one of this key may go through unconverted.
        are_plain = all(
            a is leaf or type(leaf) in _NUMBERS for a, leaf in zip(inputs, leaves)
        )
        if key is not None and are_plain and len(self._known) < _MOST:
            self._known[key] = plan

    def run(
        self,
        operation: str,
        detail: Any,
        value: Any,
        kind: Kind,
        make: Make,
        execute: Execute,
    ) -> Any:
        """Find or create the plan of a collective; execute it and return the results.

        Args:
          operation: the public call that this is.
          detail: see `find`; None for a call whose plan is not cached.
          value: the nest that the user passed.
          kind: see `find`.
          make: returns the plan, the leaves, and these as arrays; not collective.
          execute: given a plan and arrays, returns the results. Collective.
        """
        key = None
        if detail is not None:
            key, plan, leaves, spec = self.find(operation, detail, value, kind)
            if plan is not None:
                results = execute(plan, leaves)
                return plan.message.unflatten_results(results, leaves, spec)
        return self.run_first(operation, key, make, execute)

    def run_first(self, operation: str, key: Any, make: Make, execute: Execute) -> Any:
        """Like `run`, for a call without a plan; keep its plan under `key`."""
        # Held over plan and execution: two threads of a rank must not interleave.
        with self._consensus.call(operation) as call:
            plan, leaves, inputs = call.reserve(make)
            call.reserve(plan.message.try_out, leaves, inputs)
            results = execute(plan, inputs)
        # Cached only after execution: after a failed call the plan is created again, so
        # that the same error is found again.
        self.keep(key, plan, leaves, inputs)
        return plan.message.unflatten_results(results, leaves)


class CollectiveContext:
    """What the collectives of one strategy share.

    Args:
      consensus: of all ranks.
      transports: the transports.
      symmetric: the arrays that lie in memory of the node.
      results: allocates the results.
    """

    def __init__(
        self,
        consensus: Consensus,
        transports: TransportSelector,
        symmetric: SymmetricMemory,
        results: Results,
    ):
        self.consensus = consensus
        self.size = consensus.size
        self.transports = transports
        self.transport = transports.default
        self.symmetric = symmetric
        self.results = results
        self.plans = PlanCache(consensus)
        self.copies = SmallCopies()


def prepare_inputs(
    state: CollectiveContext, value: Any, options: CommunicationOptions
) -> tuple[list[Any], nest.Spec, list[Any]]:
    """Like `to_arrays`; also checks that there are transports for the arrays."""
    validation.instance("options", options, CommunicationOptions)
    leaves, spec, inputs = to_arrays(value)
    # One rank moves nothing, so it can reduce arrays wherever they are.
    if state.size > 1:
        check_each(inputs, spec, state.transports.require_reachable)
        if options.implementation is CommunicationImplementation.NCCL:
            state.transports.require_nccl("implementation='NCCL'")
    return leaves, spec, inputs


def detail_of(argument: Any, options: CommunicationOptions | None) -> Any:
    """Return the hashable part of a call's arguments; None if they are invalid."""
    if options is None:
        return argument
    is_known = isinstance(options, CommunicationOptions) and argument is not None
    return (argument, options) if is_known else None


def _kinds_of(leaves: Iterable[Any], kind: Kind) -> tuple[list[Any], tuple[Any, ...]]:
    """Return leaves, this rank's components of distributed ones, and their kinds."""
    values, kinds, is_whole = [], [], kind is kind_of
    for leaf in leaves:
        if type(leaf) in _DISTRIBUTED:
            leaf = leaf._values[0]
        values.append(leaf)
        is_array = is_whole and type(leaf) is np.ndarray  # without a call
        kinds.append((leaf.dtype, leaf.shape) if is_array else kind(leaf))
    return values, tuple(kinds)


def kind_of(leaf: Any) -> Any:
    """Return the kind of leaves whose shape must agree; see `PlanCache.find`."""
    kind = type(leaf)
    if kind is np.ndarray:
        return leaf.dtype, leaf.shape
    if kind in _NUMBERS:
        # NumPy has other dtypes for integers that do not fit
        return kind if kind is not int or -_INT_END <= leaf < _INT_END else None
    if arrays.is_device_array(leaf):
        return "GPU", leaf.device.id, leaf.dtype, leaf.shape
    return None


def kind_along(axis: Any) -> Kind | None:
    """Return a function for the kind of leaves whose length along `axis` may differ.

    Returns None for an axis that has to be checked first.

    Args:
      axis: an integer, or several.
    """
    # `is int`, as True is an int by isinstance, and no axis.
    if type(axis) is int:
        return _kind_along((axis,))
    if type(axis) is tuple and all(type(i) is int for i in axis):
        return _kind_along(axis)
    return None


@functools.lru_cache(maxsize=100)
def _kind_along(axes: tuple[int, ...]) -> Kind:
    def kind(leaf: Any) -> Any:
        if type(leaf) is np.ndarray:
            where: Any = None
        elif arrays.is_device_array(leaf):
            where = leaf.device.id
        else:
            return None
        ndim = leaf.ndim
        if axes == (0,) and ndim:
            return where, leaf.dtype, ndim, leaf.shape[1:]
        dropped = {i + ndim if i < 0 else i for i in axes}
        rest = tuple([n for i, n in enumerate(leaf.shape) if i not in dropped])
        # An axis out of range, or one named twice, leaves another number of dimensions:
        # no key, so that the slow path raises the error.
        is_whole = len(rest) + len(axes) == ndim
        return (where, leaf.dtype, ndim, rest) if is_whole else None

    return kind


# From this size on, searching for free memory is cheaper than allocating
_LARGE_BYTES = 128 << 10
_BUFFERS = 4


class Results:
    """Allocates arrays; large ones may reuse the memory of earlier results."""

    def __init__(self) -> None:
        self._buffers = Buffers(_BUFFERS)

    def empty(self, size: int, like: Any, dtype: Any = None) -> Any:
        """Return an array of one dimension with any contents, on the device of `like`.

        Args:
          size: the number of elements.
          like: another array.
          dtype: None for that of `like`.
        """
        dtype = like.dtype if dtype is None else np.dtype(dtype)
        is_large = size * dtype.itemsize >= _LARGE_BYTES
        # Only large ones, and only on the host: page faults of new memory cost more
        # than the reduction, while CuPy has a pool of its own.
        if is_large and isinstance(like, np.ndarray):
            return self._buffers.empty((size,), dtype)
        return arrays.namespace(like).empty(size, dtype)


class StepResults(Results):
    """Allocates the results of one step in one block of memory.

    The system uses large pages for large blocks, which makes access faster.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rest: Any = np.empty(0, np.uint8)

    def begin(self, size_bytes: int, like: Any) -> None:
        """Begin a step whose results have about `size_bytes` bytes.

        On a GPU, the memory is the current stream's.

        Args:
          size_bytes: of all results.
          like: an array on the device of the results.
        """
        self._rest = Results.empty(self, size_bytes, like, np.uint8)

    def empty(self, size: int, like: Any, dtype: Any = None) -> Any:
        """See `Results.empty`."""
        dtype = like.dtype if dtype is None else np.dtype(dtype)
        size_bytes = size * dtype.itemsize
        is_here = isinstance(like, np.ndarray) == isinstance(self._rest, np.ndarray)
        # More than `begin` reserved, or on another device: separate memory.
        if size_bytes > self._rest.size or not is_here:
            return super().empty(size, like, dtype)
        taken = self._rest[:size_bytes]
        # The next result begins at a cache line.
        self._rest = self._rest[round_up(size_bytes) :]
        return taken.view(dtype)

    def end(self) -> None:
        """Release the memory: it is freed with its results."""
        # A view of it keeps the memory of the step alive, hence none.
        self._rest = np.empty(0, np.uint8)
