"""Reductions of equal arrays over all ranks, and what a repeated one reuses.

A reduction runs in one of three ways, the same on all ranks:

- small arrays travel with the comparison of the calls, in one exchange
  (`reduce_packed`);
- sums of large arrays: all memory is reserved, the ranks compare their calls, and
  transports add the arrays, pack by pack (`Sum`);
- MIN, MAX and PRODUCT of large arrays: each rank gets the numbers of all, block by
  block, and combines them in rank order (`_Combination`), as MPI and NCCL do not define
  the result for nan and for integer overflow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpidist.comm import arithmetic, packing
from mpidist.comm.arithmetic import combine_in_order
from mpidist.comm.collectives.arguments import (
    check_each,
    deadline_of,
    describe,
    implementation_of,
    is_direct,
    option_fields,
    require_reducible,
)
from mpidist.comm.collectives.plans import (
    OP_TYPES,
    CollectiveContext,
    Message,
    Pack,
    detail_of,
    kind_of,
    prepare_inputs,
)
from mpidist.comm.collectives.slices import has_slices, reduce_slices
from mpidist.comm.consensus.comparison import Pages, PayloadComparison
from mpidist.comm.consensus.consensus import Call
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.packing import Kind
from mpidist.comm.transports.base import Transport
from mpidist.device import arrays
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util.dtypes import accumulator_dtype, is_float16, is_integer, traits
from mpidist.util.last_resort import spare

_DEFAULT = CommunicationOptions()


class Reduction(Protocol):
    """A reduction of large arrays, whose memory was reserved when it was made.

    `address` is where symmetric arrays are, or 0.
    """

    address: int

    def run(self, is_symmetric: bool = False) -> list[Any]:
        """Return the results, in arrays of our own. Collective, once the ranks agree.

        `is_symmetric`: whether all ranks have passed that address.
        """


Prepare = Callable[[ReduceOp, Sequence[Any], CommunicationOptions], Reduction]
# For sums of contiguous arrays
PrepareSum = Callable[[Sequence[Any], CommunicationOptions], Reduction]
# Of arrays that are no nest
_ARRAYS = Message()
# Arrays on a GPU that travel with the comparison: so many, and so many bytes
_GPU_ARRAYS = 8
_GPU_BYTES = 16 << 10
# Of one rank: results that share memory keep each other alive
_ALONE_BYTES = 128 << 10
# "Some rank has large integers": a float, so that it is not packed with such integers
_FLAG = np.dtype(np.float64)


class ReducePlan(NamedTuple):
    """One kind of reduction.

    Args:
      call: what the ranks agree on.
      op: the operation.
      options: see `CommunicationOptions`.
      message: of the value.
      is_packed: whether its packs travel with the comparison.
      pages: where the packs of all ranks are, see `Comparison.pages`.
      has_integers: whether sums or products may overflow.
      is_on_gpu: whether some of the leaves are.
      combine: reduces the arrays of two ranks.
      divisor: the divisor of totals for a mean; else 0.
      is_copied: whether results are copies of the leaves, or numbers themselves: there
        is one rank, and no other dtype.
    """

    call: Call
    op: ReduceOp
    options: CommunicationOptions
    message: Message
    is_packed: bool
    pages: Pages | None
    has_integers: bool
    is_on_gpu: bool
    combine: np.ufunc
    divisor: int
    is_copied: bool

    def fill(
        self, state: CollectiveContext, inputs: Sequence[Any], pages: Sequence[Any]
    ) -> bool:
        """Write this rank's packs; return whether their sums may overflow."""
        if self.is_on_gpu:
            # One copy for all GPU arrays, before the ranks wait for each other.
            inputs = state.copies.down(inputs)
        for pack, page in zip(self.message.packs, pages):
            pack.fill(page, inputs)
        return self.has_integers and any(
            arithmetic.may_overflow(self.op, page, state.size) for page in pages
        )


def all_reduce(
    state: CollectiveContext,
    operation: str,
    reduce_op: ReduceOp | str,
    value: Any,
    options: CommunicationOptions | None = None,
    prepare: Prepare | None = None,
) -> Any:
    """Return the elementwise reduction of `value` over all ranks, on every rank.

    Args:
      state: of the strategy.
      operation: the public call, for messages.
      reduce_op: the operation, or its name.
      value: a nest of arrays or numbers, of equal structure, shapes and dtypes; or
        of IndexedSlices, see `slices`.
      options: see `CommunicationOptions`.
      prepare: makes the reduction after all checks; by default `prepare_reduction`.

    Raises, on all ranks: see `Consensus.require_same` and `arrays.to_array`; also
      ArgumentError for a sum of integers that does not fit their dtype.
    """
    key, detail = None, None
    # A custom reduction gets a plan each time: it may not pack.
    if prepare is None and isinstance(reduce_op, OP_TYPES):
        detail = reduce_op if options is None else detail_of(reduce_op, options)
    if detail is not None:
        key, plan, leaves, spec = state.plans.find(operation, detail, value, kind_of)
        if plan is not None:
            execute = reduce_packed if plan.is_packed else _execute
            results = execute(state, plan, leaves)
            return plan.message.unflatten_results(results, leaves, spec)
    wanted = _DEFAULT if options is None else options
    with state.consensus.call(operation) as call:
        # A plan exists for dense values alone
        if key is None and call.reserve(has_slices, value):
            return reduce_slices(
                state,
                operation,
                reduce_op,
                value,
                wanted,
                lambda op, dense: all_reduce(
                    state, operation, op, dense, options, prepare
                ),
            )
        is_own = prepare is None
        return state.plans.run_first(
            operation,
            key,
            lambda: _plan(state, operation, reduce_op, value, wanted, is_own=is_own),
            lambda plan, inputs: _execute(state, plan, inputs, prepare),
        )


def _plan(
    state: CollectiveContext,
    operation: str,
    reduce_op: ReduceOp | str,
    value: Any,
    options: CommunicationOptions,
    *,
    is_own: bool,
) -> tuple[ReducePlan, list[Any], list[Any]]:
    """Return the plan of a reduction, the leaves, and the leaves as arrays.

    `is_own`: whether no function of a user's class reduces them.
    """
    op = ReduceOp.parse(reduce_op)
    leaves, spec, inputs = prepare_inputs(state, value, options)
    require_reducible(op, inputs, spec)
    agreed = (("reduce_op", op.name), *option_fields(options))
    signature = CallSignature(operation, agreed, spec, describe(inputs))
    call = state.consensus.call(signature, options.timeout_seconds)
    message = Message.of(spec, leaves)
    is_packed = is_own and fits(state, op, inputs, options)
    plan = plan_reduction(state, call, op, options, message, inputs, is_packed)
    if is_own and op.adds and not is_packed:
        sums = message_of_sums(state, op, inputs, options, message=message)
        plan = plan._replace(message=sums)
    return plan, leaves, inputs


def _execute(
    state: CollectiveContext,
    plan: ReducePlan,
    inputs: Sequence[Any],
    prepare: Prepare | None = None,
) -> list[Any]:
    """Return the reductions of the leaves, once the ranks agree. Collective."""
    if plan.is_packed:
        return reduce_packed(state, plan, inputs)
    # Plain numbers become arrays only here: the packed path takes them as they are.
    values = [a if hasattr(a, "dtype") else np.asarray(a) for a in inputs]
    return reduce_large(
        state, plan.call, plan.op, values, plan.options, prepare, plan.message
    )


# Small arrays: they travel with the comparison of the calls


def fits(
    state: CollectiveContext,
    op: ReduceOp,
    inputs: Sequence[Any],
    options: CommunicationOptions,
) -> bool:
    """Return whether the ranks can exchange arrays with the comparison of calls.

    The result is the same on all ranks.
    """
    # What fits on a page beside the call signature: see `Comparison`.
    limit = state.consensus.comparison.payload_bytes
    if state.size == 1:
        limit = _ALONE_BYTES
    if limit == 0 or is_direct(options) or options.compression is not None:
        return False
    on_gpu = sum(map(arrays.is_device_array, inputs))
    if on_gpu:  # each has to be copied twice
        limit = min(limit, _GPU_BYTES)
    if on_gpu > _GPU_ARRAYS or (on_gpu and state.size == 1):
        return False
    return arithmetic.bound_bytes(op, inputs) <= limit


def plan_reduction(
    state: CollectiveContext,
    call: Call,
    op: ReduceOp,
    options: CommunicationOptions,
    message: Message,
    inputs: Sequence[Any],
    is_packed: bool = True,
) -> ReducePlan:
    """Return the plan of a reduction whose arguments have been checked.

    Args:
      state: of the strategy.
      call: what the ranks agree on.
      op: the reduction.
      options: see `CommunicationOptions`.
      message: of the value, without packs.
      inputs: the leaves as arrays.
      is_packed: whether they travel with the comparison; see `fits`.
    """
    if is_packed:
        message = message._replace(packs=_make_packs(op, inputs))
    pages, comparison = None, state.consensus.comparison
    # One rank has no pages to share; it fills arrays of its own.
    if is_packed and state.size > 1 and isinstance(comparison, PayloadComparison):
        pages = comparison.pages([(pack.dtype, pack.shape) for pack in message.packs])
    return ReducePlan(
        call,
        op,
        options,
        message,
        is_packed,
        pages,
        combine=op.rule.combine,
        has_integers=arithmetic.may_not_fit(op, [a.dtype for a in inputs]),
        is_on_gpu=any(map(arrays.is_device_array, inputs)),
        divisor=state.size if op.rule.divides else 0,
        is_copied=is_packed
        and state.size == 1
        and all(pack.dtype is pack.out for pack in message.packs)
        and not op.rule.divides,
    )


def reduce_packed(
    state: CollectiveContext, plan: ReducePlan, inputs: Sequence[Any]
) -> list[Any]:
    """Return reductions of leaves sent with the comparison. Collective."""
    if plan.is_copied:  # nothing is exchanged, so threads need not wait
        return [a.copy() if isinstance(a, np.ndarray) else a for a in inputs]
    if plan.pages is None:
        with plan.call:
            return _reduce_alone(plan, inputs)
    packs, fill = plan.message.packs, functools.partial(plan.fill, state, inputs)
    results: list[Any] = [None] * len(inputs)
    with plan.call as call:
        parts = call.exchange(plan.pages, fill)
        while True:
            try:
                # Views of shared pages, valid until the next agreement: totals are
                # our own
                for pack, everyone in zip(packs, parts):
                    total = combine_in_order(plan.combine, everyone)
                    if plan.divisor:
                        total /= plan.divisor
                    if pack.dtype != pack.out:
                        total = total.astype(pack.out)
                    results[pack.members[0]] = total
                    if len(pack.members) > 1:
                        pack.take_apart(total, results)
                break
            except MemoryError:  # the other ranks have their results: once more
                if not spare.release():
                    raise
        # If any rank's flag is set, all ranks check
        if plan.has_integers and state.consensus.comparison.is_any_large:
            _check_overflow(state, plan, parts, results)
        return state.copies.up(results, inputs) if plan.is_on_gpu else results


def _reduce_alone(plan: ReducePlan, inputs: Sequence[Any]) -> list[Any]:
    """Return reductions of the leaves of the only rank, in new arrays."""
    results: list[Any] = [None] * len(inputs)
    for pack in plan.message.packs:
        for i in pack.members:
            total = np.array(inputs[i], pack.dtype, order="C")
            if plan.divisor:
                total /= plan.divisor
            results[i] = total if pack.dtype is pack.out else total.astype(pack.out)
    return results


def _check_overflow(
    state: CollectiveContext,
    plan: ReducePlan,
    parts: Sequence[Any],
    results: Sequence[Any],
) -> None:
    """Raise, on all ranks, if integers have overflowed in packs. Collective."""
    contributions = []
    for rank in range(state.size):
        contribution: list[Any] = [None] * len(results)
        for pack, everyone in zip(plan.message.packs, parts):
            pack.take_apart(everyone[rank], contribution)
        contributions.append(contribution)
    pairs = list(zip(results, zip(*contributions)))
    with state.consensus.collective_errors():
        check = functools.partial(arithmetic.check, plan.op)
        check_each(pairs, plan.message.spec, check)


# Large arrays: reserve, compare, move


def reduce_large(
    state: CollectiveContext,
    call: Call,
    op: ReduceOp,
    values: Sequence[Any],
    options: CommunicationOptions,
    prepare: Prepare | None = None,
    message: Message | None = None,
) -> list[Any]:
    """Return the reductions of arrays that were checked before. Collective.

    Args:
      state: of the strategy.
      call: what the ranks agree on.
      op: the operation.
      values: the arrays.
      options: see `CommunicationOptions`.
      prepare: makes the reduction; None for that of transports.
      message: of the arrays; None makes one.
    """
    with call:
        made: Reduction
        if prepare is not None:
            made = call.reserve(prepare, op, values, options)
        elif op.rule.adds:
            made = call.reserve(Sum, state, op, values, options, message)
        else:
            made = call.reserve(_Combination, state, op, values, options)
        return made.run(call.agree(made.address))


def prepare_reduction(
    state: CollectiveContext,
    op: ReduceOp,
    values: Sequence[Any],
    options: CommunicationOptions,
    prepare_sum: PrepareSum,
    is_sum: bool = True,
) -> Reduction:
    """Prepare a reduction whose SUM and MEAN are not by transports. Not collective.

    Args:
      state: of the strategy.
      op: the operation.
      values: the arrays, which were checked before.
      options: see `CommunicationOptions`.
      prepare_sum: replaces transports for SUM and MEAN.
      is_sum: whether it adds; else the result may be any integers.
    """
    if not op.adds:
        return _Combination(state, op, values, options)
    message = message_of_sums(state, op, values, options, is_sum)
    return Sum(state, op, values, options, message, prepare_sum)


class Sum:
    """SUM or MEAN of large arrays over all ranks; see `Reduction`.

    Args:
      state: of the strategy.
      op: the operation.
      values: the arrays.
      options: see `CommunicationOptions`.
      message: of these arrays; None makes one.
      prepare_sum: replaces transports.
      in_place: whether symmetric arrays may be added where they lie.

    `run` raises, on all ranks, ArgumentError for integers that do not fit their dtype.
    """

    address = 0
    _inner: Reduction | None = None

    def __init__(
        self,
        state: CollectiveContext,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
        message: Message | None = None,
        prepare_sum: PrepareSum | None = None,
        in_place: bool = True,
    ):
        if message is None:
            message = message_of_sums(state, op, values, options)
        self._state, self._op, self._options = state, op, options
        self._message, empty = message, state.results.empty
        self._partial = partial = [
            a
            if type(a) is np.ndarray and a.dtype == dtype and a.flags.carray
            else arithmetic.contiguous(a, dtype)
            for a, dtype in zip(values, message.sends)
        ]
        self._narrow = [
            (j, empty(partial[j].size, partial[j], message.out[j]))
            for j in message.narrow
        ]
        if message.has_flag:
            partial.append(_count_large(state, op, partial))
        if prepare_sum is not None:
            self._inner = prepare_sum(partial, options)
        elif state.size == 1:
            # Copies: results never alias arguments.
            self._memory = [value.copy() for value in partial]
        elif (
            in_place
            and state.symmetric.regions
            and (address := _address_of(state, partial, options))
        ):
            self.address = address
            self._inner = _SymmetricSum(state, partial, options)
        else:
            self._memory = [
                empty(p.size, partial[p.members[0]], p.dtype) for p in message.packs
            ]

    def run(self, is_symmetric: bool = False) -> list[Any]:
        """See `Reduction`."""
        state, partial, message = self._state, self._partial, self._message
        if self.address and not is_symmetric:
            # Other ranks have passed other arrays, which are not symmetric to these
            self._inner = sum_of(state, partial, self._options)
        if self._inner is not None:
            totals = self._inner.run()
        elif state.size == 1:
            totals = self._memory
        else:
            timeout = self._options.timeout_seconds
            deadline = None if timeout is None else deadline_of(self._options)
            totals = [None] * len(partial)
            for pack, total in zip(message.packs, self._memory):
                sends = [partial[j] for j in pack.members]
                transport, wire = pack.transport, pack.wire
                state.transports.count(transport.name, total.nbytes)
                transport.allreduce(sends, total, deadline, wire)
                # Totals may have been narrow on the way, so all are
                if wire is None and sends[0].dtype != pack.dtype:
                    arithmetic.round_to(sends[0].dtype, total)
                totals[pack.members[0]] = total.reshape(pack.shape)
                if len(pack.members) > 1:
                    pack.take_apart(total, totals)
        if message.has_flag:
            _check_integers(state, partial, totals)
            del totals[-1]  # the flag is not a result
        if self._op.rule.divides or self._narrow:
            arithmetic.finish(self._op, totals, self._narrow, state.size)
        return totals


def sum_of(
    state: CollectiveContext,
    values: Sequence[Any],
    options: CommunicationOptions,
    transport: Transport | None = None,
) -> Sum:
    """Return the sum of contiguous arrays over all ranks, for `run`. Not collective.

    float16 and bfloat16 are added up in float32, which the sums have then. Integers are
    not checked.

    Args:
      state: of the strategy.
      values: the arrays.
      options: see `CommunicationOptions`.
      transport: adds them, if it can.
    """
    kinds, shapes = list(map(packing.kind_of, values)), [a.shape for a in values]
    sends = [dtype for dtype, _ in kinds]
    packs = _divide(state, kinds, shapes, options, transport)
    message = Message(sends=sends, packs=packs)
    return Sum(state, ReduceOp.SUM, values, options, message, in_place=False)


def message_of_sums(
    state: CollectiveContext,
    op: ReduceOp,
    values: Sequence[Any],
    options: CommunicationOptions,
    is_sum: bool = True,
    message: Message = _ARRAYS,
) -> Message:
    """Return how arrays like these are summed over all ranks.

    With compression, arrays on GPUs are sent in the narrower dtype. Those on the
    host keep theirs until they are sent to other nodes: see `Pack.wire`.
    """
    compression = options.compression if state.size > 1 else None
    on_gpu = [arrays.is_device_array(a) for a in values]
    out, sends = arithmetic.dtypes_to_add(op, [a.dtype for a in values])
    if compression is not None:
        sends = out
        if any(on_gpu):
            sends = [arithmetic.wire_dtype(dtype, compression) for dtype in out]
    totals = map(accumulator_dtype, sends)
    narrow = [j for j, total in enumerate(totals) if total != out[j]]
    has_flag = is_sum and state.size > 1 and arithmetic.may_not_fit(op, out)
    kinds = list(zip(sends, on_gpu))
    shapes = [tuple(a.shape) for a in values]
    if has_flag:
        kinds.append((_FLAG, False))
        shapes.append((1,))
    packs = _divide(state, kinds, shapes, options)
    return message._replace(
        sends=sends, out=out, narrow=narrow, packs=packs, has_flag=has_flag
    )


def _divide(
    state: CollectiveContext,
    kinds: Sequence[Kind],
    shapes: Sequence[tuple[int, ...]],
    options: CommunicationOptions,
    transport: Transport | None = None,
) -> list[Pack]:
    """Return the packs of arrays, given their kinds and shapes.

    `transport` adds them if it can; else the one that the options ask for.
    """
    if state.size == 1:
        return []
    sizes = list(map(math.prod, shapes))
    sizes_bytes = [n * dtype.itemsize for n, (dtype, _) in zip(sizes, kinds)]
    whole = {k for k in kinds if transport is None and _is_one_pack(state, k, options)}
    packs = []
    for members in packing.groups(kinds, sizes_bytes, options.bytes_per_pack, whole):
        kind = kinds[members[0]]
        # Sums of 16-bit floats are accumulated in float32; see
        # `Transport.allreduce`.
        total = accumulator_dtype(kind[0])
        pack = Pack.of(members, shapes, total, total)
        adder = _narrowing(state, kind, options)
        wire = None
        if adder is not None:
            wire = arithmetic.wire_dtype(kind[0], options.compression)
        else:
            size_bytes = pack.size * total.itemsize
            adder = _transport_for(state, kind, size_bytes, options, transport)
        packs.append(pack._replace(transport=adder, wire=wire))
    return packs


def _is_one_pack(
    state: CollectiveContext, kind: Kind, options: CommunicationOptions
) -> bool:
    """Return whether the bits of sums could depend on how arrays are packed.

    They do if the order of additions depends on the size of a pack, or on the place in
    it, and is not that of the ranks.
    """
    dtype, is_device = kind
    is_exact = is_integer(dtype) or state.size == 2
    is_ordered = options.reproducible or is_float16(dtype)
    how = implementation_of(options)
    return not (
        is_exact or state.transports.pick(how, is_ordered, is_device).is_ordered
    )


def _narrowing(
    state: CollectiveContext, kind: Kind, options: CommunicationOptions
) -> Transport | None:
    dtype, is_device = kind
    is_wide = traits(dtype).is_narrowed
    if options.compression is None or is_device or not is_wide:
        return None
    return state.transports.narrowing(implementation_of(options), options.reproducible)


def _transport_for(
    state: CollectiveContext,
    kind: Kind,
    size_bytes: int,
    options: CommunicationOptions,
    transport: Transport | None,
) -> Transport:
    dtype, is_device = kind
    is_ordered = options.reproducible or is_float16(dtype)
    # A transport that was chosen for all is replaced where it cannot do this pack.
    if (
        transport is None
        or transport.device != is_device
        or (is_ordered and not transport.is_ordered)
    ):
        choice = state.transports.pick(
            implementation_of(options), is_ordered, is_device
        )
        return choice.for_size("allreduce", size_bytes)
    return transport


def _address_of(
    state: CollectiveContext, values: Sequence[Any], options: CommunicationOptions
) -> int:
    """Return `SymmetricMemory.place_of` if it helps that arrays are symmetric."""
    in_node = state.transports.intra_node
    # In-place reduction only helps where the transport is the node's own and
    # numbers keep their width.
    if in_node is None or is_direct(options) or options.compression:
        return 0
    # Reproducible sums need the order of the ranks, which not every transport
    # keeps.
    if state.size == 1 or (options.reproducible and not in_node.is_ordered):
        return 0
    return state.symmetric.place_of(values)


class _SymmetricSum:
    """Sums of arrays of which symmetric ones are added where they lie."""

    address = 0

    def __init__(
        self,
        state: CollectiveContext,
        values: Sequence[Any],
        options: CommunicationOptions,
    ):
        self._state, self._values, self._options = state, values, options
        # By their number, the arrays of all ranks of the node
        by_number = enumerate(map(state.symmetric.everyone, values))
        self._symmetric = {j: parts for j, parts in by_number if parts is not None}
        self._rest = [j for j in range(len(values)) if j not in self._symmetric]
        self._sum_rest = sum_of(state, [values[j] for j in self._rest], options)
        self._sums = {
            j: state.results.empty(a.size, a, accumulator_dtype(a.dtype))
            for j, a in enumerate(values)
            if j in self._symmetric
        }

    def run(self, is_symmetric: bool = False) -> list[Any]:
        """See `Reduction`."""
        transports, sums = self._state.transports, list(self._sums.values())
        totals = dict(zip(self._rest, self._sum_rest.run()))
        assert transports.intra_node is not None
        transports.count(transports.intra_node.name, sum(a.nbytes for a in sums))
        transports.intra_node.allreduce_symmetric(
            list(self._symmetric.values()), sums, deadline_of(self._options)
        )
        for j, total in self._sums.items():
            totals[j] = total.reshape(self._values[j].shape)
        return [totals[j] for j in range(len(self._values))]


def _count_large(state: CollectiveContext, op: ReduceOp, partial: Sequence[Any]) -> Any:
    """Return 1 if sums of integers over all ranks may overflow, else 0.

    Ranks add it along with the arrays. (It is a float, so that it is not packed
    with large integer arrays.)
    """
    is_large = any(arithmetic.may_overflow(op, a, state.size) for a in partial)
    return np.array([is_large], _FLAG)


def _check_integers(
    state: CollectiveContext, partial: Sequence[Any], totals: list[Any]
) -> None:
    """Raise, on all ranks, if sums of integers do not fit. Collective.

    Only if some rank has large integers, all are added again in float64, whatever
    options and operations the user has chosen for the sums.
    """
    # The total of all ranks' flags: zero on all or none, so all return here
    # together.
    if not totals[-1][0]:
        return
    integers = [j for j, a in enumerate(partial) if is_integer(a.dtype)]
    with state.consensus.call("a sum of large integers") as call:
        wide_sum = call.reserve(
            lambda: sum_of(
                state, [partial[j].astype(np.float64) for j in integers], _DEFAULT
            )
        )
        call.agree()
        wide = wide_sum.run()

        def check() -> None:
            for j, estimate in zip(integers, wide, strict=True):
                dtype = partial[j].dtype
                if dtype.itemsize < 8:  # exact; Open MPI saturates sums of few bits
                    totals[j] = estimate.astype(np.int64).astype(dtype)
                name = "value" if len(partial) == 2 else f"array {j} of the value"
                what = f"the sum of {name} over all replicas"
                arithmetic.check_overflow(totals[j], estimate, what)

        call.finish(check)


def _make_packs(op: ReduceOp, inputs: Sequence[Any]) -> list[Pack]:
    out, sends = arithmetic.dtypes_to_add(op, [a.dtype for a in inputs])
    # By both dtypes: float16 and float32 go apart, though both are sent as float32
    groups: dict[Any, list[int]] = {}
    # Scalars come last
    for i in sorted(range(len(inputs)), key=lambda i: not inputs[i].ndim):
        groups.setdefault((sends[i], out[i]), []).append(i)
    shapes = [a.shape for a in inputs]
    return [Pack.of(members, shapes, *dtypes) for dtypes, members in groups.items()]


# Of all ranks, gathered at a time
_BLOCK_BYTES = 32 << 20


class _Combination:
    """Reductions of gathered arrays, combined in rank order; see `Reduction`.

    Args:
      state: of the strategy.
      op: the operation.
      values: arrays, equal in number, shapes and dtypes on all ranks.
      options: see `CommunicationOptions`.

    `run` raises, on all ranks, ArgumentError for a product of integers that does not
    fit their dtype.
    """

    address = 0

    def __init__(
        self,
        state: CollectiveContext,
        op: ReduceOp,
        values: Sequence[Any],
        options: CommunicationOptions,
    ):
        self._state, self._op, self._options = state, op, options
        out, wide = arithmetic.to_add(op, values)
        empty, shapes = state.results.empty, [a.shape for a in values]
        sizes, kinds = [a.nbytes for a in wide], list(map(packing.kind_of, wide))
        # With each pack its arrays, and memory for a block of all ranks and the result
        self._packs = []
        for members in packing.groups(kinds, sizes, options.bytes_per_pack):
            send = packing.pack([wide[j] for j in members]).reshape(-1)
            # Room for one block of every rank, however long the arrays are.
            step = min(send.size, _step(state, send)) * state.size
            pack = Pack.of(members, shapes, send.dtype, send.dtype)
            memory = empty(step, send), empty(send.size, send)
            self._packs.append((pack, send, *memory))
        self._narrow = [
            (j, empty(a.size, a, out[j]))
            for j, a in enumerate(wide)
            if a.dtype != out[j]
        ]
        self._count = len(values)

    def run(self, is_symmetric: bool = False) -> list[Any]:
        """See `Reduction`."""
        deadline = deadline_of(self._options)
        results: list[Any] = [None] * self._count
        for pack, send, received, total in self._packs:
            self._combine(send, received, total, deadline)
            pack.take_apart(total, results)
        arithmetic.finish(self._op, results, self._narrow, self._state.size)
        return results

    def _combine(
        self, send: Any, received: Any, total: Any, deadline: float | None
    ) -> None:
        state, op, ranks = self._state, self._op, self._state.size
        step = _step(state, send)
        transport: Transport | None = None
        if ranks > 1:
            is_device = arrays.is_device_array(send)
            how = implementation_of(self._options)
            transport = state.transports.pick(how, False, is_device)
        for start in range(0, send.size, step):
            mine = send[start : start + step]
            parts = [mine]
            if transport is not None:
                block = received[: mine.size * ranks]
                transport.allgatherv(mine, block, [mine.size] * ranks, deadline)
                parts = list(block.reshape(ranks, -1))
            part = total[start : start + step]
            arithmetic.combine_in_order(op.rule.combine, parts, out=part)
            if arithmetic.may_not_fit(op, [part.dtype]):
                _check_blocks(state, op, part, parts, start)


def _step(state: CollectiveContext, send: Any) -> int:
    """Return how many numbers of each rank are gathered at a time."""
    # Of all ranks together, so that more ranks do not take more memory.
    row_bytes: int = send.dtype.itemsize * state.consensus.size
    return max(1, _BLOCK_BYTES // row_bytes)


def _check_blocks(
    state: CollectiveContext, op: ReduceOp, total: Any, parts: Sequence[Any], start: int
) -> None:
    """Raise, on all ranks, if integers have overflowed.

    Args:
      state: of the strategy.
      op: the operation.
      total: the result.
      parts: of all ranks.
      start: the number of its first element in the pack.
    """
    # All ranks have the same parts, so all raise, or none does.
    with state.consensus.collective_errors():
        for block, *others in arithmetic.in_blocks([total, *parts]):
            name = f"value (numbers {start} to {start + block.size - 1})"
            arithmetic.check(op, (block, others), name)
            start += block.size
