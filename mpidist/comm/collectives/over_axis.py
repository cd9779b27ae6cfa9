"""Reductions over an axis and over all ranks; lengths along it may differ."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic, packing
from mpidist.comm.collectives.arguments import (
    axis_field,
    check_each,
    describe_as,
    option_fields,
    require_reducible,
)
from mpidist.comm.collectives.gather import GatherPlan, execute_gather, plan_gather
from mpidist.comm.collectives.plans import (
    OP_TYPES,
    CollectiveContext,
    Message,
    detail_of,
    kind_along,
    kind_of,
    prepare_inputs,
)
from mpidist.comm.collectives.reduce import (
    PrepareSum,
    ReducePlan,
    Reduction,
    fits,
    plan_reduction,
    reduce_packed,
    sum_of,
)
from mpidist.comm.consensus.consensus import Call
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.packing import Axis
from mpidist.device import arrays
from mpidist.errors import ArgumentError
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util.last_resort import with_spare

_DEFAULT = CommunicationOptions()


class AxisPlan(NamedTuple):
    """One kind of reduction over an axis.

    Args:
      call: what the ranks agree on.
      op: the operation.
      options: see `CommunicationOptions`.
      message: of the value.
      dtypes: of the results.
      axes: over which each is reduced.
      packed: the sums formed with the comparison; None for other cases.
      gather: of the ranks' reductions; None for sums.
      is_large: whether the results are.
    """

    call: Call
    op: ReduceOp
    options: CommunicationOptions
    message: Message
    dtypes: Sequence[np.dtype[Any]]
    axes: Sequence[tuple[int, ...]]
    packed: ReducePlan | None = None
    gather: GatherPlan | None = None
    is_large: bool = False


class _Partial(NamedTuple):
    """The reductions of one rank.

    Args:
      sent: the reduction of each leaf, for sums the lengths, then each `estimate` that
        is not None.
      estimate: for each leaf its reduction in float64, if integers may overflow.
    """

    sent: list[Any]
    estimate: list[Any]


def reduce_over_axis(
    state: CollectiveContext,
    operation: str,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: Axis,
    options: CommunicationOptions | None = None,
    prepare_sum: PrepareSum | None = None,
) -> Any:
    """Return the reduction over `axis` and all ranks, on every rank. Collective.

    Lengths along `axis` may differ between ranks and may be zero; the other
    dimensions must agree. A mean is the sum of all elements divided by the sum of
    all lengths, or nan if that is zero. Floating values are added up in double
    precision, integers in 64 bits; the result has the dtype of `value` (a mean of
    integers is float64; as in NumPy, 64-bit integers are added in float64 for it).
    `prepare_sum` replaces transports for SUM and MEAN.

    Raises, on all ranks: see `all_reduce`; also ArgumentError for an
    axis out of range, a sum or product of integers that does not fit their dtype,
    and MIN or MAX of no elements; ArgumentTypeError for an axis that is not an
    integer.
    """
    wanted = _DEFAULT if options is None else options
    kind, detail = kind_along(axis), None
    is_known = kind is not None and isinstance(reduce_op, OP_TYPES)
    if is_known and prepare_sum is None:
        detail = detail_of((reduce_op, axis), options)
    return state.plans.run(
        operation,
        detail,
        value,
        kind or kind_of,
        lambda: _plan(state, operation, reduce_op, value, axis, wanted, prepare_sum),
        lambda plan, inputs: _execute(state, plan, inputs, prepare_sum),
    )


def _plan(
    state: CollectiveContext,
    operation: str,
    reduce_op: ReduceOp | str,
    value: Any,
    axis: Axis,
    options: CommunicationOptions,
    prepare_sum: PrepareSum | None,
) -> tuple[AxisPlan, list[Any], list[Any]]:
    op = ReduceOp.parse(reduce_op)
    leaves, spec, inputs = prepare_inputs(state, value, options)
    require_reducible(op, inputs, spec)
    axes = check_each(
        inputs, spec, lambda a, name: packing.normalize_axes(axis, a.ndim, name)
    )
    # The reduced axis is left out: its length may differ between ranks.
    rest = [packing.without(a.shape, drop) for a, drop in zip(inputs, axes)]
    described = tuple(map(describe_as, inputs, rest))
    agreed = ("reduce_op", op.name), axis_field(axes), *option_fields(options)
    signature = CallSignature(operation, agreed, spec, described)
    call = state.consensus.call(signature, options.timeout_seconds)
    message = Message.of(spec, leaves)
    dtypes = [op.rule.result(a.dtype) for a in inputs]
    is_large = 8 * sum(map(math.prod, rest)) >= packing.LARGE_BYTES
    plan = AxisPlan(call, op, options, message, dtypes, axes)
    plan = plan._replace(is_large=is_large)
    # Run once on arrays without rows, which shows dtypes and shapes of what is
    # sent.
    sent = _reduce_own(state, plan, list(map(_without_rows, inputs, axes))).sent
    if not op.adds:
        along = [0] * len(sent)
        gather = plan_gather(state, call, sent, along, options)
        plan = plan._replace(gather=gather)
    elif prepare_sum is None and fits(state, ReduceOp.SUM, sent, options):
        packed = plan_reduction(state, call, ReduceOp.SUM, options, message, sent)
        # Overflows are found by the sums in float64
        plan = plan._replace(packed=packed._replace(has_integers=False))
    return plan, leaves, inputs


def _reduce_own(
    state: CollectiveContext, plan: AxisPlan, inputs: Sequence[Any]
) -> _Partial:
    op, pairs = plan.op, list(zip(inputs, plan.axes))
    estimate = [arithmetic.estimate_over_axes(op, a, axes) for a, axes in pairs]
    more = [r for r in estimate if r is not None]
    if not op.adds:
        rows = [_row(op, a, axes) for a, axes in pairs]
        return _Partial([*rows, *(r[None] for r in more)], estimate)
    partial = [arithmetic.over_axes(op, a, axes) for a, axes in pairs]
    lengths = np.array([math.prod(a.shape[i] for i in axes) for a, axes in pairs])
    return _Partial([*partial, lengths, *more], estimate)


def _row(op: ReduceOp, array: Any, axes: tuple[int, ...]) -> Any:
    """Return a reduction over axes as a row; no row if there is none of nothing."""
    # If all ranks have no row there is an error, raised on all of them
    if op.rule.has_empty or all(array.shape[i] for i in axes):
        return arithmetic.over_axes(op, array, axes)[None]
    shape = packing.without(array.shape, axes)
    return arrays.namespace(array).empty((0, *shape), op.rule.wide(array.dtype))


def _execute(
    state: CollectiveContext,
    plan: AxisPlan,
    inputs: Sequence[Any],
    prepare_sum: PrepareSum | None = None,
) -> list[Any]:
    """Return the reductions of the leaves. Collective."""

    def prepare() -> tuple[_Partial, list[Reduction]]:
        # The plan is cached and shared by threads; memory belongs to this call.
        partial = _reduce_own(state, plan, inputs)
        if not plan.op.adds or plan.packed is not None:
            return partial, []
        count, own = len(inputs), functools.partial(sum_of, state)
        values = (prepare_sum or own)(partial.sent[:count], plan.options)
        # Lengths, and what shows overflows, are not the user's to change
        return partial, [values, own(partial.sent[count:], _DEFAULT)]

    with plan.call as call:
        # A reduction of this rank's rows may fail (memory)
        partial, sums = call.reserve(prepare)
        if plan.gather is not None:
            totals = execute_gather(state, plan.gather, partial.sent)
        elif plan.packed is not None:
            totals = reduce_packed(state, plan.packed, partial.sent)
        else:
            call.agree()
            totals = [total for each in sums for total in each.run()]
        finish = call.finish if plan.is_large else with_spare
        results = finish(_finish, state, plan, totals, partial.estimate)
    # As NumPy's sum does, give an array scalar where no dimension is left
    return [result[()] for result in results]


def _finish(
    state: CollectiveContext,
    plan: AxisPlan,
    totals: Sequence[Any],
    estimate: Sequence[Any],
) -> list[Any]:
    """Return the results, given what was summed or gathered."""
    op, spec, count = plan.op, plan.message.spec, len(plan.dtypes)
    more = iter(totals[count + op.adds :])
    wide: Sequence[Any] = totals[:count]
    with state.consensus.collective_errors():
        if not op.adds:
            wide = check_each(wide, spec, functools.partial(_combine, op))
        if op.rule.divides:
            wide = [a / np.float64(n) for a, n in zip(wide, totals[count].tolist())]
        estimate = [None if r is None else next(more) for r in estimate]
        if not op.adds:
            estimate = [
                r if r is None else arithmetic.combine_estimates(op, r)
                for r in estimate
            ]
        triples = list(zip(wide, estimate, plan.dtypes))
        return check_each(triples, spec, functools.partial(arithmetic.narrow, op))


def _combine(op: ReduceOp, parts: Any, name: str) -> Any:
    """Return the reduction of the ranks' rows; ranks without elements have none."""
    if len(parts):
        return arithmetic.combine_in_order(op.rule.combine, list(parts))
    if math.prod(parts.shape[1:]):
        raise ArgumentError(
            f"{op.name} of {name} is not defined: it has no elements along the axis on "
            "any replica"
        )
    return parts.sum(axis=0)


def _without_rows(array: Any, axes: tuple[int, ...]) -> Any:
    return array[tuple(slice(0 if i in axes else None) for i in range(array.ndim))]
