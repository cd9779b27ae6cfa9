"""Reductions over an axis and over all ranks; lengths along it may differ."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic, packing
from mpidist.comm.collectives.arguments import (
    axis_field,
    check_each,
    describe_as,
    option_fields,
)
from mpidist.comm.collectives.gather import Gathers
from mpidist.comm.collectives.reduce import Sums
from mpidist.comm.consensus.agreement import Agreement
from mpidist.comm.consensus.calls import Call
from mpidist.comm.packing import Axis
from mpidist.device import arrays
from mpidist.errors import ArgumentError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util import nest

__all__ = ["AxisReductions", "Summation", "Take"]

Summation = Callable[[Sequence[Any], CommunicationOptions], list[Any]]
# Returns the leaves of a value, its structure, and the leaves as arrays
Take = Callable[[Any, CommunicationOptions], tuple[list[Any], nest.Spec, list[Any]]]


class _Prepared(NamedTuple):
    """What a rank has found out before the ranks agree.

    Args:
      op: the operation.
      leaves: of the value.
      spec: its structure.
      given: the leaves as arrays.
      axes: over which each is reduced.
      partial: this rank's reductions of them.
      rough: these in float64 where they may overflow, else None.
      packs: of what is to be summed; empty where something else sums, or nothing does.
    """

    op: ReduceOp
    leaves: list[Any]
    spec: nest.Spec
    given: list[Any]
    axes: list[tuple[int, ...]]
    partial: list[Any]
    rough: list[Any]
    packs: Sequence[Any]

    @property
    def sent(self) -> list[Any]:
        """What the ranks add up: sums and lengths travel together."""
        pairs = zip(self.given, self.axes)
        lengths = [math.prod(a.shape[i] for i in axes) for a, axes in pairs]
        rough = [r for r in self.rough if r is not None]
        return [*self.partial, np.array(lengths), *rough]


class AxisReductions:
    """The reductions over axes of one strategy.

    Args:
      agreement: of all ranks.
      sums: the sums over ranks.
      gathers: the gathers.
      take: checks a value, and takes it apart.
    """

    def __init__(self, agreement: Agreement, sums: Sums, gathers: Gathers, take: Take):
        self._agreement = agreement
        self._sums = sums
        self._gathers = gathers
        self._take = take

    def reduce(
        self,
        operation: str,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: Axis,
        options: CommunicationOptions,
        sum_arrays: Summation | None = None,
    ) -> Any:
        """See `Collectives.reduce_over_axis`."""
        with self._agreement.turns:
            found = self._agreement.prepare(
                operation,
                lambda: self._prepare(reduce_op, value, axis, options, sum_arrays),
            )
            op, spec, given = found.op, found.spec, found.given
            described = tuple(
                describe_as(a, packing.without(a.shape, drop))
                for a, drop in zip(given, found.axes)
            )
            axes = axis_field(found.axes)
            agreed = (("reduce_op", op.name), axes, *option_fields(options))
            call = Call(operation, agreed, spec, described)
            self._agreement.require_same(call, timeout=options.timeout_seconds)
            if op.adds:
                results = self._sum(found, options, sum_arrays)
            else:
                results = self._combine(operation, found, options)
        # As NumPy's sum does, give an array scalar where no dimension is left
        results = [arrays.like(r[()], leaf) for r, leaf in zip(results, found.leaves)]
        return nest.unflatten(spec, results)

    def _prepare(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: Axis,
        options: CommunicationOptions,
        sum_arrays: Summation | None,
    ) -> _Prepared:
        op = ReduceOp.parse(reduce_op)
        leaves, spec, given = self._take(value, options)
        check = functools.partial(arithmetic.require_reducible, op)
        check_each(given, spec, lambda a, name: check(a.dtype, name))
        axes = check_each(
            given, spec, lambda a, name: packing.normalize_axes(axis, a.ndim, name)
        )
        reduce, roughly = arithmetic.combine_over, arithmetic.rough_product_over
        if op.adds:
            reduce, roughly = arithmetic.sum_over, arithmetic.rough_sum_over
        pairs = list(zip(given, axes))
        partial = [reduce(op, a, drop) for a, drop in pairs]
        rough = [roughly(op, a, drop) for a, drop in pairs]
        found = _Prepared(op, leaves, spec, given, axes, partial, rough, ())
        if op.adds and sum_arrays is None and self._agreement.size > 1:
            return found._replace(packs=self._sums.reserve(found.sent, options))
        return found

    def _sum(
        self,
        found: _Prepared,
        options: CommunicationOptions,
        sum_arrays: Summation | None,
    ) -> list[Any]:
        """Return sums or means over all ranks. Collective."""
        if found.packs:
            totals = self._sums.sum_packs(found.packs, options)
        else:
            totals = (sum_arrays or self._sums.sum_arrays)(found.sent, options)
        count = len(found.given)
        lengths, more = totals[count].tolist(), iter(totals[count + 1 :])
        if found.op is ReduceOp.MEAN:
            return [
                arithmetic.mean_of(total, length, a.dtype)
                for total, length, a in zip(totals, lengths, found.given)
            ]
        rough = [None if r is None else next(more) for r in found.rough]
        return self._narrow(found, totals[:count], rough, "sum")

    def _combine(
        self, operation: str, found: _Prepared, options: CommunicationOptions
    ) -> list[Any]:
        """Return MIN, MAX or PRODUCT over all ranks. Collective.

        Those of ranks without elements are missing in what is gathered.
        """
        rough = [r for r in found.rough if r is not None]
        sent = [*found.partial, *rough]
        gathered = self._gathers.gather(operation, sent, [0] * len(sent), options)
        count = len(found.given)

        def combine(parts: Any, name: str) -> Any:
            if not len(parts):
                if math.prod(parts.shape[1:]):
                    raise ArgumentError(
                        f"there is no {found.op.name} of {name}: it has no elements "
                        "along the axis, on any replica"
                    )
                return parts.sum(axis=0)
            return arithmetic.combine_in_order(found.op, list(parts))

        with self._agreement.same_on_all():
            totals = check_each(gathered[:count], found.spec, combine)
        if found.op is not ReduceOp.PRODUCT:
            return [t.astype(a.dtype, copy=False) for t, a in zip(totals, found.given)]
        more = iter(gathered[count:])
        rough = [
            None if r is None else arithmetic.rough_product(next(more))
            for r in found.rough
        ]
        return self._narrow(found, totals, rough, "product")

    def _narrow(
        self, found: _Prepared, totals: Sequence[Any], rough: Sequence[Any], what: str
    ) -> list[Any]:
        """Return totals in the dtypes of what was given; integers must fit."""
        dtypes = [a.dtype for a in found.given]
        triples = list(zip(totals, rough, dtypes))
        with self._agreement.same_on_all():
            return check_each(
                triples, found.spec, lambda t, name: arithmetic.narrow(t, name, what)
            )
