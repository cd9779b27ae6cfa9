"""Reductions of equal arrays over all ranks, and what a repeated one reuses.

A reduction runs in one of three ways, the same on all ranks:

- small arrays travel with the comparison of the calls, in one exchange
  (`reduce_packed`);
- sums of large arrays: all memory is reserved, the ranks compare their calls, and
  transports add the arrays, pack by pack (`prepare`);
- MIN, MAX and PRODUCT of large arrays: each rank gets the numbers of all, block by
  block, and combines them in rank order, as MPI and NCCL do not define the result for
  nan and for integer overflow.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
    Structure,
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

# A symmetric address, or 0, and what moves the data once the ranks agree: it is given
# whether all ranks have passed that address
Prepared = tuple[int, Callable[[bool], list[Any]]]
Reduction = Callable[[ReduceOp, Sequence[Any], CommunicationOptions], Prepared]
# Reserves memory, and returns what sums arrays over all ranks
Summation = Callable[[Sequence[Any], CommunicationOptions], Callable[[], list[Any]]]
_DEFAULT = CommunicationOptions()
# Arrays on a GPU that travel with the comparison: so many, and so many bytes
_GPU_ARRAYS = 8
_GPU_BYTES = 16 << 10
# Of one rank: results that share memory keep each other alive
_ALONE_BYTES = 128 << 10
# "Some rank has large integers": a float, so that it is not packed with such integers
_FLAG = np.dtype(np.float64)


class _Pack(NamedTuple):
    """Leaves that are sent and reduced as one array.

    Args:
      dtype: in which they are sent.
      out: of the results.
      shape: `(elements,)`, or that of the leaf if there is but one.
      alone: the number of this leaf; None if there are several.
      arrays: the numbers of the leaves that are arrays; they come first in the pack.
      cuts: for each of them where it is in the pack, and its shape.
      scalars: the numbers of those that have no dimensions, one element each.
      members: the numbers of all leaves.
    """

    dtype: np.dtype[Any]
    out: np.dtype[Any]
    shape: tuple[int, ...]
    alone: int | None
    arrays: tuple[int, ...]
    cuts: tuple[tuple[slice, tuple[int, ...]], ...]
    scalars: tuple[int, ...]
    members: Sequence[int]

    def fill(self, page: Any, leaves: Sequence[Any]) -> None:
        """Write the leaves into `page`, an array of this dtype and shape."""
        if self.alone is not None:
            page[...] = leaves[self.alone]
            return
        end = page.size - len(self.scalars)
        if self.arrays:
            # One call for all arrays, whose cost is per call rather than per byte.
            rows = [leaves[i].reshape(-1) for i in self.arrays]
            np.concatenate(rows, out=page[:end], casting="same_kind")
        for position, i in enumerate(self.scalars, end):
            page[position] = leaves[i]

    def take_apart(self, total: Any, results: list[Any]) -> None:
        if self.alone is not None:
            results[self.alone] = total
            return
        for i, (cut, shape) in zip(self.arrays, self.cuts):
            results[i] = total[cut].reshape(shape)
        for position, i in enumerate(self.scalars, total.size - len(self.scalars)):
            # A view of length 1, not an item: results are arrays, and can be written
            # to.
            results[i] = total[position : position + 1].reshape(())


class _SumPack(NamedTuple):
    """Arrays that are summed as one.

    Args:
      members: their positions among the arrays to sum.
      shapes: their shapes.
      size: how many elements they have.
      dtype: of the totals.
      transport: adds them.
      wire: the dtype in which it sends them; None for their own.
    """

    members: Sequence[int]
    shapes: Sequence[tuple[int, ...]]
    size: int
    dtype: np.dtype[Any]
    transport: Transport
    wire: np.dtype[Any] | None


class SumPlan(NamedTuple):
    """How the sums of large arrays are formed.

    Args:
      out: the dtypes of the results.
      sends: the dtypes in which the arrays are added.
      narrow: the numbers of the arrays whose result is narrower than their total.
      is_checked: whether integers may overflow. Then the number of ranks with large
        ones is summed as another, last array.
      packs: of all arrays; empty for one rank.
    """

    out: Sequence[np.dtype[Any]]
    sends: Sequence[np.dtype[Any]]
    narrow: Sequence[int]
    is_checked: bool
    packs: Sequence[_SumPack]


class ReducePlan(NamedTuple):
    """One kind of reduction.

    Args:
      call: what the ranks agree on.
      op: the operation.
      options: see `CommunicationOptions`.
      structure: of the value.
      packs: the leaves sent with the comparison; empty if none.
      pages: where the packs of all ranks are, see `Comparison.pages`.
      has_integers: whether sums or products may overflow.
      is_on_gpu: whether some of the leaves are.
      combine: reduces the arrays of two ranks.
      divisor: the divisor of totals for a mean; else 0.
      is_copied: whether results are copies of the leaves, or numbers themselves: there
        is one rank, and no other dtype.
      sums: of large arrays; None for small ones and for what is not a sum.
    """

    call: Call
    op: ReduceOp
    options: CommunicationOptions
    structure: Structure
    packs: Sequence[_Pack]
    pages: Pages | None
    has_integers: bool
    is_on_gpu: bool
    combine: np.ufunc
    divisor: int
    is_copied: bool
    sums: SumPlan | None = None


def all_reduce(
    state: CollectiveContext,
    operation: str,
    reduce_op: ReduceOp | str,
    value: Any,
    options: CommunicationOptions | None = None,
    reduction: Reduction | None = None,
) -> Any:
    """Return the elementwise reduction of `value` over all ranks, on every rank.

    Args:
      state: of the strategy.
      operation: the public call, for messages.
      reduce_op: the operation, or its name.
      value: a nest of arrays or numbers, of equal structure, shapes and dtypes; or
        of IndexedSlices, see `slices`.
      options: see `CommunicationOptions`.
      reduction: prepares the reduction after all checks; by default `prepare`.

    Raises, on all ranks: see `Consensus.require_same` and `arrays.to_array`; also
      ArgumentError for a sum of integers that does not fit their dtype.
    """
    key, detail = None, None
    # A custom reduction gets a plan each time: it may not pack.
    if reduction is None and isinstance(reduce_op, OP_TYPES):
        detail = reduce_op if options is None else detail_of(reduce_op, options)
    if detail is not None:
        key, plan, leaves, spec = state.plans.find(operation, detail, value, kind_of)
        if plan is not None:
            execute = reduce_packed if plan.packs else _execute
            results = execute(state, plan, leaves)
            return plan.structure.unflatten_results(results, leaves, spec)
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
                    state, operation, op, dense, options, reduction
                ),
            )
        is_own = reduction is None
        return state.plans.run_first(
            operation,
            key,
            lambda: _plan(state, operation, reduce_op, value, wanted, is_own=is_own),
            lambda plan, inputs: _execute(state, plan, inputs, reduction),
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
    structure = Structure.of(spec, leaves)
    is_packed = is_own and fits(state, op, inputs, options)
    plan = plan_reduction(state, call, op, options, structure, inputs, is_packed)
    if is_own and op.adds and not is_packed:
        plan = plan._replace(sums=_plan_sums(state, op, inputs, options))
    return plan, leaves, inputs


def _execute(
    state: CollectiveContext,
    plan: ReducePlan,
    inputs: Sequence[Any],
    reduction: Reduction | None = None,
) -> list[Any]:
    """Return the reductions of the leaves, once the ranks agree. Collective."""
    if plan.packs:
        return reduce_packed(state, plan, inputs)
    # Plain numbers become arrays only here: the packed path takes them as they are.
    values = [a if hasattr(a, "dtype") else np.asarray(a) for a in inputs]
    if reduction is None:
        reduction = functools.partial(prepare, state, plan=plan.sums)
    with plan.call as call:
        address, move = call.reserve(reduction, plan.op, values, plan.options)
        return move(call.agree(address))


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
    structure: Structure,
    inputs: Sequence[Any],
    is_packed: bool = True,
) -> ReducePlan:
    """Return the plan of a reduction whose arguments have been checked.

    Args:
      state: of the strategy.
      call: what the ranks agree on.
      op: the reduction.
      options: see `CommunicationOptions`.
      structure: of the value.
      inputs: the leaves as arrays.
      is_packed: whether they travel with the comparison; see `fits`.
    """
    packs = _make_packs(op, inputs) if is_packed else []
    pages, comparison = None, state.consensus.comparison
    # One rank has no pages to share; it fills arrays of its own.
    if packs and state.size > 1 and isinstance(comparison, PayloadComparison):
        pages = comparison.pages([(pack.dtype, pack.shape) for pack in packs])
    return ReducePlan(
        call,
        op,
        options,
        structure,
        packs,
        pages,
        combine=op.rule.combine,
        has_integers=arithmetic.may_not_fit(op, [a.dtype for a in inputs]),
        is_on_gpu=any(map(arrays.is_device_array, inputs)),
        divisor=state.size if op.rule.divides else 0,
        is_copied=state.size == 1
        and all(pack.dtype is pack.out for pack in packs)
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

    def fill(pages: Sequence[Any]) -> bool:
        """Write this rank's packs; return whether their sums may overflow."""
        # One copy for all GPU arrays, before the ranks wait for each other.
        host = state.copies.down(inputs) if plan.is_on_gpu else inputs
        for pack, page in zip(plan.packs, pages):
            pack.fill(page, host)
        return plan.has_integers and any(
            arithmetic.may_overflow(plan.op, page, state.size) for page in pages
        )

    results: list[Any] = [None] * len(inputs)
    with plan.call as call:
        parts = call.exchange(plan.pages, fill)
        while True:
            try:
                # Views of shared pages, valid until the next agreement: totals are
                # our own
                for pack, everyone in zip(plan.packs, parts):
                    total = combine_in_order(plan.combine, everyone)
                    if plan.divisor:
                        total /= plan.divisor
                    if pack.dtype != pack.out:
                        total = total.astype(pack.out)
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
    for pack in plan.packs:
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
        for pack, everyone in zip(plan.packs, parts):
            pack.take_apart(everyone[rank], contribution)
        contributions.append(contribution)
    pairs = list(zip(results, zip(*contributions)))
    with state.consensus.collective_errors():
        check = functools.partial(arithmetic.check, plan.op)
        check_each(pairs, plan.structure.spec, check)


# Large arrays: reserve, compare, move


def reduce_large(
    state: CollectiveContext,
    call: Call,
    op: ReduceOp,
    values: Sequence[Any],
    options: CommunicationOptions,
) -> list[Any]:
    """Return the reductions of arrays that were checked before. Collective.

    Args:
      state: of the strategy.
      call: what the ranks agree on.
      op: the operation.
      values: the arrays.
      options: see `CommunicationOptions`.
    """
    with call:
        address, move = call.reserve(prepare, state, op, values, options)
        return move(call.agree(address))


def prepare(
    state: CollectiveContext,
    op: ReduceOp,
    values: Sequence[Any],
    options: CommunicationOptions,
    summation: Summation | None = None,
    is_sum: bool = True,
    plan: SumPlan | None = None,
) -> Prepared:
    """Prepare the reduction of arrays that were checked before. Not collective.

    All memory is reserved here, where a failure of one rank can still be reported.

    Args:
      state: of the strategy.
      op: the operation.
      values: the arrays.
      options: see `CommunicationOptions`.
      summation: replaces transports for SUM and MEAN.
      is_sum: whether it adds; else the result may be any integers.
      plan: of SUM and MEAN by transports; None makes one.

    Returns: see `Prepared`. What moves the data raises, on all ranks, ArgumentError
      for integers that do not fit their dtype.
    """
    if plan is None and not op.adds:
        packs = _reserve_combination(state, op, values, options)
        return 0, lambda _: _combine(state, op, packs, values, options)
    sums = plan or _plan_sums(state, op, values, options, is_sum)
    partial = [
        a
        if type(a) is np.ndarray and a.dtype == dtype and a.flags.carray
        else arithmetic.contiguous(a, dtype)
        for a, dtype in zip(values, sums.sends)
    ]
    narrow = [
        (j, state.results.empty(partial[j].size, partial[j], sums.out[j]))
        for j in sums.narrow
    ]
    if sums.is_checked:
        partial.append(_count_large(state, op, partial))
    address = 0
    if summation is None:
        summation = functools.partial(prepare_sums, state)
        if state.symmetric.regions:
            address = _address_of(state, partial, options)
    if address:
        sum_here = _prepare_symmetric(state, partial, options)
    elif plan is None:
        sum_here = summation(partial, options)
    else:
        sum_here = prepare_sums(state, partial, options, packs=plan.packs)

    def move(is_symmetric: bool) -> list[Any]:
        if address and not is_symmetric:
            # Other ranks have passed other arrays, which are not symmetric to these
            totals = summation(partial, options)()
        else:
            totals = sum_here()
        if sums.is_checked:
            _check_integers(state, partial, totals)
            del totals[-1]  # the flag is not a result
        if op.rule.divides or narrow:
            arithmetic.finish(op, totals, narrow, state.size)
        return totals

    return address, move


def _plan_sums(
    state: CollectiveContext,
    op: ReduceOp,
    values: Sequence[Any],
    options: CommunicationOptions,
    is_sum: bool = True,
) -> SumPlan:
    """Return how arrays like these are summed over all ranks.

    With compression, arrays on GPUs are sent in the narrower dtype. Those on the
    host keep theirs until they are sent to other nodes: see `_SumPack.wire`.
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
    is_checked = is_sum and state.size > 1 and arithmetic.may_not_fit(op, out)
    kinds = list(zip(sends, on_gpu))
    shapes = [tuple(a.shape) for a in values]
    if is_checked:
        kinds.append((_FLAG, False))
        shapes.append((1,))
    packs = _divide(state, kinds, shapes, options)
    return SumPlan(out, sends, narrow, is_checked, packs)


def _divide(
    state: CollectiveContext,
    kinds: Sequence[Kind],
    shapes: Sequence[tuple[int, ...]],
    options: CommunicationOptions,
    transport: Transport | None = None,
) -> list[_SumPack]:
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
        size = sum(sizes[j] for j in members)
        # Sums of 16-bit floats are accumulated in float32; see
        # `Transport.allreduce`.
        total = accumulator_dtype(kind[0])
        adder = _narrowing(state, kind, options)
        wire = None
        if adder is not None:
            wire = arithmetic.wire_dtype(kind[0], options.compression)
        else:
            size_bytes = size * total.itemsize
            adder = _transport_for(state, kind, size_bytes, options, transport)
        inside = [shapes[j] for j in members]
        packs.append(_SumPack(members, inside, size, total, adder, wire))
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


def prepare_sums(
    state: CollectiveContext,
    values: Sequence[Any],
    options: CommunicationOptions,
    transport: Transport | None = None,
    packs: Sequence[_SumPack] | None = None,
) -> Callable[[], list[Any]]:
    """Reserve memory; return what sums contiguous arrays over all ranks.

    The sums are arrays of our own. float16 and bfloat16 are added up in float32,
    which the sums have then. Not collective; what it returns is.

    Args:
      state: of the strategy.
      values: contiguous arrays.
      options: see `CommunicationOptions`.
      transport: adds them, if it can.
      packs: of these arrays; None makes them.
    """
    # A copy: results never alias arguments.
    if state.size == 1:
        copies = [value.copy() for value in values]
        return lambda: copies
    if packs is None:
        kinds = list(map(packing.kind_of, values))
        shapes = [tuple(a.shape) for a in values]
        packs = _divide(state, kinds, shapes, options, transport)
    chosen, empty = packs, state.results.empty
    memory = [empty(p.size, values[p.members[0]], p.dtype) for p in packs]

    def sum_here() -> list[Any]:
        timeout = options.timeout_seconds
        deadline = None if timeout is None else deadline_of(options)
        totals: list[Any] = [None] * len(values)
        for pack, total in zip(chosen, memory):
            sends = [values[j] for j in pack.members]
            transport, wire = pack.transport, pack.wire
            state.transports.count(transport.name, total.nbytes)
            transport.allreduce(sends, total, deadline, wire)
            # Totals may have been narrow on the way, so all are
            if wire is None and sends[0].dtype != pack.dtype:
                arithmetic.round_to(sends[0].dtype, total)
            if len(pack.members) == 1:
                totals[pack.members[0]] = total.reshape(pack.shapes[0])
                continue
            for j, part in zip(pack.members, packing.unpack(total, pack.shapes)):
                totals[j] = part
        return totals

    return sum_here


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


def _prepare_symmetric(
    state: CollectiveContext, values: Sequence[Any], options: CommunicationOptions
) -> Callable[[], list[Any]]:
    """Like `prepare_sums`; symmetric arrays are added where they lie."""
    in_node = state.transports.intra_node
    assert in_node is not None
    # By their number, the arrays of all ranks of the node
    by_number = enumerate(map(state.symmetric.everyone, values))
    symmetric = {j: everyone for j, everyone in by_number if everyone is not None}
    rest = [j for j in range(len(values)) if j not in symmetric]
    sum_rest = prepare_sums(state, [values[j] for j in rest], options)
    sums = {
        j: state.results.empty(values[j].size, values[j], _total_dtype(values[j]))
        for j in symmetric
    }

    def sum_here() -> list[Any]:
        totals = dict(zip(rest, sum_rest()))
        state.transports.count(in_node.name, sum(a.nbytes for a in sums.values()))
        in_node.allreduce_symmetric(
            list(symmetric.values()), list(sums.values()), deadline_of(options)
        )
        for j, total in sums.items():
            totals[j] = total.reshape(values[j].shape)
        return [totals[j] for j in range(len(values))]

    return sum_here


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
        sum_wide = call.reserve(
            lambda: prepare_sums(
                state, [partial[j].astype(np.float64) for j in integers], _DEFAULT
            )
        )
        call.agree()
        wide = sum_wide()

        def check() -> None:
            for j, estimate in zip(integers, wide, strict=True):
                dtype = partial[j].dtype
                if dtype.itemsize < 8:  # exact; Open MPI saturates sums of few bits
                    totals[j] = estimate.astype(np.int64).astype(dtype)
                name = "value" if len(partial) == 2 else f"array {j} of the value"
                what = f"the sum of {name} over all replicas"
                arithmetic.check_overflow(totals[j], estimate, what)

        call.finish(check)


def _make_packs(op: ReduceOp, inputs: Sequence[Any]) -> list[_Pack]:
    out, sends = arithmetic.dtypes_to_add(op, [a.dtype for a in inputs])
    # By both dtypes: float16 and float32 go apart, though both are sent as float32
    groups: dict[Any, list[int]] = {}
    for i, kind in enumerate(zip(sends, out)):
        groups.setdefault(kind, []).append(i)
    return [
        _pack(dtype, result, members, inputs)
        for (dtype, result), members in groups.items()
    ]


def _pack(
    dtype: np.dtype[Any],
    out: np.dtype[Any],
    members: Sequence[int],
    inputs: Sequence[Any],
) -> _Pack:
    if len(members) == 1:
        shape = inputs[members[0]].shape
        return _Pack(dtype, out, shape, members[0], (), (), (), members)
    scalars = tuple(i for i in members if not inputs[i].ndim)
    others = tuple(i for i in members if inputs[i].ndim)
    cuts, end = [], 0
    for i in others:
        cuts.append((slice(end, end + inputs[i].size), inputs[i].shape))
        end += inputs[i].size
    shape = (end + len(scalars),)
    return _Pack(dtype, out, shape, None, others, tuple(cuts), scalars, members)


def _total_dtype(array: Any) -> np.dtype[Any]:
    return accumulator_dtype(array.dtype)


# Of all ranks, gathered at a time
_BLOCK_BYTES = 32 << 20


class _GatheredPack(NamedTuple):
    """Arrays of one dtype that are combined together, and memory for it.

    Args:
      members: their positions among the arrays that were passed.
      send: these arrays, concatenated.
      received: for a block of all ranks.
      total: for the result, of `send`'s size.
      results: for each array, in its own dtype; None if it is a part of `total`.
    """

    members: Sequence[int]
    send: Any
    received: Any
    total: Any
    results: Sequence[Any]


def _reserve_combination(
    state: CollectiveContext,
    op: ReduceOp,
    values: Sequence[Any],
    options: CommunicationOptions,
) -> list[_GatheredPack]:
    """Allocate memory. Not collective.

    Args:
      state: of the strategy.
      op: the operation.
      values: arrays, equal in number, shapes and dtypes on all ranks.
      options: see `CommunicationOptions`.
    """
    out, wide = arithmetic.to_add(op, values)
    sizes, kinds = [a.nbytes for a in wide], list(map(packing.kind_of, wide))
    packs = []
    for members in packing.groups(kinds, sizes, options.bytes_per_pack):
        send = packing.pack([wide[j] for j in members]).reshape(-1)
        # Room for one block of every rank, however long the arrays are.
        step = min(send.size, _step(state, send)) * state.consensus.size
        received = state.results.empty(step, send)
        total = state.results.empty(send.size, send)
        narrow = [
            None
            if out[j] == send.dtype
            else state.results.empty(values[j].size, values[j], out[j])
            for j in members
        ]
        packs.append(_GatheredPack(members, send, received, total, narrow))
    return packs


def _step(state: CollectiveContext, send: Any) -> int:
    """Return how many numbers of each rank are gathered at a time."""
    # Of all ranks together, so that more ranks do not take more memory.
    row_bytes: int = send.dtype.itemsize * state.consensus.size
    return max(1, _BLOCK_BYTES // row_bytes)


def _combine(
    state: CollectiveContext,
    op: ReduceOp,
    packs: Sequence[_GatheredPack],
    values: Sequence[Any],
    options: CommunicationOptions,
) -> list[Any]:
    """Return reductions of the arrays that memory was reserved for. Collective.

    Raises, on all ranks: ArgumentError for a product of integers that does not fit
      their dtype.
    """
    deadline = deadline_of(options)
    results: list[Any] = [None] * len(values)
    for pack in packs:
        _combine_pack(state, op, pack, options, deadline)
        shapes = [values[j].shape for j in pack.members]
        parts = packing.unpack(pack.total, shapes)
        for j, part, narrow in zip(pack.members, parts, pack.results, strict=True):
            results[j] = part
            if narrow is not None:
                results[j] = narrow.reshape(part.shape)
                results[j][...] = part
    return results


def _combine_pack(
    state: CollectiveContext,
    op: ReduceOp,
    pack: _GatheredPack,
    options: CommunicationOptions,
    deadline: float | None,
) -> None:
    send, ranks, step = pack.send, state.consensus.size, _step(state, pack.send)
    transport: Transport | None = None
    if ranks > 1:
        is_device = arrays.is_device_array(send)
        transport = state.transports.pick(implementation_of(options), False, is_device)
    for start in range(0, send.size, step):
        mine = send[start : start + step]
        parts = [mine]
        if transport is not None:
            received = pack.received[: mine.size * ranks]
            transport.allgatherv(mine, received, [mine.size] * ranks, deadline)
            parts = list(received.reshape(ranks, -1))
        total = pack.total[start : start + step]
        arithmetic.combine_in_order(op.rule.combine, parts, out=total)
        if arithmetic.may_not_fit(op, [total.dtype]):
            _check_blocks(state, op, total, parts, start)


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
