"""Small reductions: leaves are sent with the comparison of the calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic
from mpidist.comm.collectives.arguments import check_each, is_direct
from mpidist.comm.collectives.plans import Structure
from mpidist.comm.consensus.comparison import Pages, PayloadComparison
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.signatures import CallSignature, digest
from mpidist.device import arrays
from mpidist.device.copies import SmallCopies
from mpidist.options import CommunicationOptions, ReduceOp

__all__ = ["PackedReductions", "ReducePlan"]

# Arrays on a GPU that travel with the comparison: so many, and so many bytes
_GPU_ARRAYS = 8
_GPU_BYTES = 16 << 10
# Of one rank: results that share memory keep each other alive
_ALONE_BYTES = 128 << 10


class Pack(NamedTuple):
    """Leaves that are sent and reduced as one array.

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
        # Alone: the page has the leaf's own shape, so the result needs no reshape.
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
        """Put the parts of `total` into `results`, each by the number of its leaf."""
        if self.alone is not None:
            results[self.alone] = total
            return
        for i, (cut, shape) in zip(self.arrays, self.cuts):
            results[i] = total[cut].reshape(shape)
        for position, i in enumerate(self.scalars, total.size - len(self.scalars)):
            # A view of length 1, not an item: results are arrays, and can be written
            # to.
            results[i] = total[position : position + 1].reshape(())


class ReducePlan(NamedTuple):
    """One kind of reduction.

    Args:
      call: what the ranks compare.
      number: its digest.
      op: the operation.
      options: see `CommunicationOptions`.
      structure: of the value.
      packs: the leaves sent with the comparison; empty if none.
      pages: where the packs of all ranks are, see `Comparison.pages`.
      has_integers: whether sums or products may overflow.
      is_on_gpu: whether some of the leaves are.
      combine: reduces the arrays of all ranks to a total.
      divisor: the divisor of totals for a mean; else 0.
    """

    call: CallSignature
    number: int
    op: ReduceOp
    options: CommunicationOptions
    structure: Structure
    packs: Sequence[Pack]
    pages: Pages | None
    has_integers: bool
    is_on_gpu: bool
    combine: Callable[[Sequence[Any]], Any]
    divisor: int


class PackedReductions:
    """The small reductions of one strategy.

    Args:
      consensus: of all ranks.
    """

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._copies = SmallCopies()

    def fits(
        self, op: ReduceOp, given: Sequence[Any], options: CommunicationOptions
    ) -> bool:
        """Return whether the ranks can exchange arrays with the comparison of calls.

        The result is the same on all ranks.
        """
        # What fits on a page beside the call signature: see `Comparison`.
        limit = self._consensus.comparison.payload_bytes
        if self._consensus.size == 1:
            limit = _ALONE_BYTES
        if limit == 0 or is_direct(options) or options.compression is not None:
            return False
        on_gpu = sum(map(arrays.is_device_array, given))
        if on_gpu:  # each has to be copied twice
            # Down to the host, and up again.
            limit = min(limit, _GPU_BYTES)
        if on_gpu > _GPU_ARRAYS or (on_gpu and self._consensus.size == 1):
            return False
        return arithmetic.bound_bytes(op, given) <= limit

    def plan(
        self,
        call: CallSignature,
        op: ReduceOp,
        options: CommunicationOptions,
        structure: Structure,
        given: Sequence[Any],
        packed: bool,
    ) -> ReducePlan:
        """Return the plan of a reduction whose arguments have been checked.

        Args:
          call: what the ranks are to compare.
          op: the reduction.
          options: see `CommunicationOptions`.
          structure: of the value.
          given: the leaves as arrays.
          packed: whether they are sent with the comparison; see `fits`.
        """
        packs = _make_packs(op, given) if packed else []
        pages, comparison = None, self._consensus.comparison
        is_alone = self._consensus.size == 1
        # One rank has no pages to share; it fills arrays of its own.
        if packs and not is_alone and isinstance(comparison, PayloadComparison):
            pages = comparison.pages([(pack.dtype, pack.shape) for pack in packs])
        return ReducePlan(
            call,
            digest(call),
            op,
            options,
            structure,
            packs,
            pages,
            arithmetic.may_not_fit(op, [a.dtype for a in given]),
            any(map(arrays.is_device_array, given)),
            arithmetic.add_in_order
            if op.adds
            else functools.partial(arithmetic.combine_in_order, op),
            self._consensus.size if op is ReduceOp.MEAN else 0,
        )

    def reduce(self, plan: ReducePlan, given: Sequence[Any]) -> list[Any]:
        """Return reductions of leaves sent with the comparison. Collective."""

        def fill(pages: Sequence[Any]) -> bool:
            """Write this rank's packs; return whether their sums may overflow."""
            # One copy for all GPU arrays, before the ranks wait for each other.
            host = self._copies.down(given) if plan.is_on_gpu else given
            for pack, page in zip(plan.packs, pages):
                pack.fill(page, host)
            return plan.has_integers and any(
                arithmetic.may_overflow(page, self._consensus.size) for page in pages
            )

        consensus, timeout = self._consensus, plan.options.timeout_seconds
        if plan.pages is None:  # of one rank
            # `fill` still converts and packs, so that one rank gives the same dtypes as
            # many.
            alone = [np.empty(pack.shape, pack.dtype) for pack in plan.packs]
            fill(alone)
            parts: Sequence[Sequence[Any]] = [(a,) for a in alone]
        else:
            parts = consensus.exchange(
                plan.call, plan.number, plan.pages, fill, timeout
            )
        results: list[Any] = [None] * len(given)
        # `parts` are views of shared pages, valid until the next exchange: `combine`
        # makes totals of our own.
        for pack, everyone in zip(plan.packs, parts):
            total = plan.combine(everyone)
            if plan.divisor:
                total /= plan.divisor
            if pack.dtype != pack.out:
                total = total.astype(pack.out)
            pack.take_apart(total, results)
        # If any rank's flag is set, all ranks check
        if plan.has_integers and (
            plan.op is ReduceOp.PRODUCT or consensus.comparison.is_any_large
        ):
            self._require_fit(plan, parts, results)
        return self._copies.up(results, given) if plan.is_on_gpu else results

    def _require_fit(
        self, plan: ReducePlan, parts: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Raise, on all ranks, if integers have overflowed in packs. Collective."""
        contributions = []
        for rank in range(self._consensus.size):
            contribution: list[Any] = [None] * len(results)
            for pack, everyone in zip(plan.packs, parts):
                pack.take_apart(everyone[rank], contribution)
            contributions.append(contribution)
        pairs = list(zip(results, zip(*contributions)))
        is_product = plan.op is ReduceOp.PRODUCT
        check = arithmetic.check_product if is_product else arithmetic.check_sum
        with self._consensus.same_on_all():
            check_each(pairs, plan.structure.spec, check)


def _make_packs(op: ReduceOp, given: Sequence[Any]) -> list[Pack]:
    """Return how arrays are packed: those of one dtype, with one dtype as result."""
    # Arrays of length 0 show which dtypes a reduction sends and returns.
    out, partial = arithmetic.to_add(op, [a.reshape(-1)[:0] for a in given])
    # By both dtypes: float16 and float32 go apart, though both are sent as float32
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
