"""Plans of all-reduces: what follows from the kind of a call, found out once.

A plan says what the ranks compare, and how the leaves of a nest are packed. A call of a
kind that was seen before takes its plan from here, and needs no other checks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic
from mpidist.comm.collectives.arguments import check_each, describe, option_fields
from mpidist.comm.consensus.agreement import Agreement
from mpidist.comm.consensus.calls import Call, digest
from mpidist.comm.consensus.comparison import BoardComparison, Pages, Payload
from mpidist.device import arrays
from mpidist.device.copies import SmallCopies
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util import nest

__all__ = ["Pack", "Plan", "Plans", "make_packs"]

_MOST = 1000  # plans that are kept
_NUMBERS = {float, complex, np.float32, np.float64, np.complex64, np.complex128}
_FLAT = (list, tuple)
_NAMES = (str, ReduceOp)  # these can be looked up; what else there may be is an error


class Pack(NamedTuple):
    """Leaves that are sent as one array, and added up as one.

    Args:
      dtype: in which they are sent.
      out: of the results.
      shape: `(elements,)`, or that of the leaf if there is but one.
      alone: the number of this leaf; None if there are several.
      arrays: the numbers of the leaves that are arrays; they come first in the pack.
      cuts: for each of them where it is in the pack, and its shape.
      scalars: the numbers of those that have no dimensions, one element each.
    """

    dtype: np.dtype[Any]
    out: np.dtype[Any]
    shape: tuple[int, ...]
    alone: int | None
    arrays: tuple[int, ...]
    cuts: tuple[tuple[slice, tuple[int, ...]], ...]
    scalars: tuple[int, ...]

    def fill(self, page: Any, leaves: Sequence[Any]) -> None:
        """Write the leaves into `page`, an array of this dtype and shape."""
        if self.alone is not None:
            page[...] = leaves[self.alone]
            return
        end = page.size - len(self.scalars)
        if self.arrays:
            rows = [leaves[i].reshape(-1) for i in self.arrays]
            np.concatenate(rows, out=page[:end], casting="same_kind")
        for position, i in enumerate(self.scalars, end):
            page[position] = leaves[i]

    def take_apart(self, total: Any, results: list[Any]) -> None:
        """Put the parts of `total` into `results`, each by the number of its leaf."""
        if self.alone is not None:
            results[self.alone] = total
            return
        for i, (cut, shape) in zip(self.arrays, self.cuts):
            results[i] = total[cut].reshape(shape)
        for position, i in enumerate(self.scalars, total.size - len(self.scalars)):
            results[i] = total[position : position + 1].reshape(())


class Plan(NamedTuple):
    """One kind of all-reduce.

    Args:
      call: what the ranks compare; it has the structure of the value.
      number: its digest.
      op: the operation.
      options: see `CommunicationOptions`.
      packs: how the leaves travel with the comparison; empty where they do not.
      pages: where the packs of all ranks are, see `Comparison.pages`.
      has_integers: whether sums or products may overflow.
      is_on_gpu: whether some of the leaves are.
      strangers: the numbers of the leaves that are no arrays of NumPy.
      kind: of the value: list or tuple if its members are the leaves, None if it is the
        only leaf, else `nest.Spec`.
      combine: what makes a total of the arrays of all ranks.
      divisor: by which totals are divided, for a mean; else 0.
    """

    call: Call
    number: int
    op: ReduceOp
    options: CommunicationOptions
    packs: Sequence[Pack]
    pages: Pages | None
    has_integers: bool
    is_on_gpu: bool
    strangers: Sequence[int]
    kind: type | None
    combine: Callable[[Sequence[Any]], Any]
    divisor: int

    def give_back(self, results: list[Any], leaves: Sequence[Any]) -> Any:
        """Return results as the nest, and the kinds of leaves, that were given."""
        for i in self.strangers:
            results[i] = arrays.like(results[i], leaves[i])
        if self.kind is None:
            return results[0]
        if self.kind in _FLAT:
            return results if self.kind is list else tuple(results)
        assert self.call.spec is not None
        return nest.unflatten(self.call.spec, results)


class Plans:
    """The plans of one strategy; those of calls with default options are kept."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._copies = SmallCopies()
        self._known: dict[Any, Plan] = {}

    def find(
        self, operation: str, reduce_op: Any, value: Any
    ) -> tuple[Any, Plan | None, Sequence[Any]]:
        """Return the key of a call, its plan, and the leaves of its value.

        The key is None for what cannot be known again: leaves of which type and shape
        do not tell what becomes of them. Then, and for a new key, there is no plan.
        """
        if type(reduce_op) not in _NAMES:
            return None, None, ()
        if type(value) is np.ndarray:
            key: Any = operation, reduce_op, value.dtype, value.shape
            return key, self._known.get(key), (value,)
        if type(value) in _FLAT:
            kinds = tuple(map(_kind, value))
            if None not in kinds:
                key = operation, reduce_op, type(value), kinds
                return key, self._known.get(key), value
        leaves, spec = nest.flatten(value)
        kinds = tuple(map(_kind, leaves))
        if None in kinds:
            return None, None, leaves
        key = operation, reduce_op, spec, kinds
        return key, self._known.get(key), leaves

    def keep(
        self, key: Any, plan: Plan, leaves: Sequence[Any], given: Sequence[Any]
    ) -> None:
        """Use a plan for calls with this key from now on.

        Not if leaves have to be converted each time, as arrays of swapped bytes have.
        """
        are_plain = all(
            a is leaf or type(leaf) in _NUMBERS for a, leaf in zip(given, leaves)
        )
        if key is not None and are_plain and len(self._known) < _MOST:
            self._known[key] = plan

    def make(
        self,
        operation: str,
        op: ReduceOp,
        spec: nest.Spec,
        leaves: Sequence[Any],
        given: Sequence[Any],
        options: CommunicationOptions,
        packs: Sequence[Pack],
    ) -> Plan:
        """Return the plan of an all-reduce whose arguments have been checked.

        Args:
          operation: the public call that this is.
          op: the reduction.
          spec: the structure of the value.
          leaves: as the user passed them.
          given: these as arrays.
          options: see `CommunicationOptions`.
          packs: of them, if they travel with the comparison.
        """
        agreed = (("reduce_op", op.name), *option_fields(options))
        call = Call(operation, agreed, spec, describe(given))
        pages, comparison = None, self._agreement.comparison
        if packs and isinstance(comparison, BoardComparison):
            pages = comparison.pages([(pack.dtype, pack.shape) for pack in packs])
        return Plan(
            call,
            digest(call),
            op,
            options,
            packs,
            pages,
            arithmetic.may_not_fit(op, [a.dtype for a in given]),
            any(map(arrays.is_device_array, given)),
            [i for i, leaf in enumerate(leaves) if type(leaf) is not np.ndarray],
            _kind_of(spec, len(leaves)),
            arithmetic.add_in_order
            if op.adds
            else functools.partial(arithmetic.combine_in_order, op),
            self._agreement.size if op is ReduceOp.MEAN else 0,
        )

    def reduce_packs(self, plan: Plan, given: Sequence[Any]) -> list[Any]:
        """Return reductions of leaves that travel with the comparison. Collective."""

        def fill(pages: Sequence[Any]) -> bool:
            """Write this rank's packs; return whether their sums may overflow."""
            host = self._copies.down(given) if plan.is_on_gpu else given
            for pack, page in zip(plan.packs, pages):
                pack.fill(page, host)
            return plan.has_integers and any(
                arithmetic.may_overflow(page, self._agreement.size) for page in pages
            )

        agreement, timeout = self._agreement, plan.options.timeout_seconds
        if plan.pages is None:  # of one rank
            alone = [np.empty(pack.shape, pack.dtype) for pack in plan.packs]
            fill(alone)
            parts: Sequence[Sequence[Any]] = [(a,) for a in alone]
        else:
            payload = Payload(plan.pages, fill)
            parts = agreement.exchange(plan.call, plan.number, payload, timeout)
        results: list[Any] = [None] * len(given)
        for pack, everyone in zip(plan.packs, parts):
            total = plan.combine(everyone)
            if plan.divisor:
                total /= plan.divisor
            if pack.dtype != pack.out:
                total = total.astype(pack.out)
            pack.take_apart(total, results)
        if plan.has_integers and (
            plan.op is ReduceOp.PRODUCT or agreement.comparison.is_any_large
        ):
            self._require_fit(plan, parts, results)
        return self._copies.up(results, given) if plan.is_on_gpu else results

    def _require_fit(
        self, plan: Plan, parts: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Raise, on all ranks, if integers have overflowed in packs. Collective."""
        contributions = []
        for rank in range(self._agreement.size):
            contribution: list[Any] = [None] * len(results)
            for pack, everyone in zip(plan.packs, parts):
                pack.take_apart(everyone[rank], contribution)
            contributions.append(contribution)
        pairs = list(zip(results, zip(*contributions)))
        is_product = plan.op is ReduceOp.PRODUCT
        check = arithmetic.check_product if is_product else arithmetic.check_sum
        assert plan.call.spec is not None
        with self._agreement.same_on_all():
            check_each(pairs, plan.call.spec, check)


def make_packs(op: ReduceOp, given: Sequence[Any]) -> list[Pack]:
    """Return how arrays are packed: those of one dtype, with one dtype as result."""
    out, partial = arithmetic.to_add(op, [a.reshape(-1)[:0] for a in given])
    groups: dict[Any, list[int]] = {}
    for i, (dtype, empty) in enumerate(zip(out, partial)):
        groups.setdefault((empty.dtype, dtype), []).append(i)
    return [
        _pack(dtype, result, members, given)
        for (dtype, result), members in groups.items()
    ]


def _pack(
    dtype: np.dtype[Any],
    out: np.dtype[Any],
    members: Sequence[int],
    given: Sequence[Any],
) -> Pack:
    if len(members) == 1:
        return Pack(dtype, out, given[members[0]].shape, members[0], (), (), ())
    scalars = tuple(i for i in members if not given[i].ndim)
    others = tuple(i for i in members if given[i].ndim)
    cuts, end = [], 0
    for i in others:
        cuts.append((slice(end, end + given[i].size), given[i].shape))
        end += given[i].size
    return Pack(dtype, out, (end + len(scalars),), None, others, tuple(cuts), scalars)


def _kind(leaf: Any) -> Any:
    """Return what leaves have in common of which the same becomes; None if unknown."""
    kind = type(leaf)
    if kind is np.ndarray:
        return leaf.dtype, leaf.shape
    if kind in _NUMBERS:
        return kind
    return ("GPU", leaf.dtype, leaf.shape) if arrays.is_device_array(leaf) else None


def _kind_of(spec: nest.Spec, leaves: int) -> type | None:
    """Return `Plan.kind` of values of a structure."""
    if spec.type is None:
        return None
    is_flat = spec.type in _FLAT and spec.num_children == leaves == spec.num_nodes - 1
    return spec.type if is_flat else nest.Spec
