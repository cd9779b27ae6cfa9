"""Plans of all-reduces: what follows from the kind of a call, found out once.

A plan says what the ranks compare, and how the leaves of a nest are packed. A call of a
kind that was seen before takes its plan from here, and needs no other checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import arithmetic
from mpidist.comm.consensus.calls import Call
from mpidist.comm.consensus.comparison import Pages
from mpidist.device import arrays
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util import nest

__all__ = ["Pack", "Plan", "Plans", "make_packs"]

_MOST = 1000  # plans that are kept
_NUMBERS = {float, complex, np.float32, np.float64, np.complex64, np.complex128}
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
      has_integers: whether sums may overflow.
      is_on_gpu: whether some of the leaves are.
      strangers: the numbers of the leaves that are no arrays of NumPy.
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

    def give_back(self, results: list[Any], leaves: Sequence[Any]) -> Any:
        """Return results as the nest, and the kinds of leaves, that were given."""
        for i in self.strangers:
            results[i] = arrays.like(results[i], leaves[i])
        spec = self.call.spec
        assert spec is not None
        return results[0] if spec.type is None else nest.unflatten(spec, results)


class Plans:
    """The plans of one strategy, for calls with default options."""

    def __init__(self) -> None:
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
        leaves, spec = nest.flatten(value)
        kinds = tuple(
            [
                (leaf.dtype, leaf.shape)
                if type(leaf) is np.ndarray
                else type(leaf)
                if type(leaf) in _NUMBERS
                else _kind_on_gpu(leaf)
                for leaf in leaves
            ]
        )
        if None in kinds:
            return None, None, leaves
        key = operation, reduce_op, spec, kinds
        return key, self._known.get(key), leaves

    def keep(self, key: Any, plan: Plan) -> None:
        """Use a plan for calls with this key from now on."""
        if key is not None and len(self._known) < _MOST:
            self._known[key] = plan


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


def _kind_on_gpu(leaf: Any) -> Any:
    """Return what arrays of CuPy of one kind have in common; None for other leaves."""
    return ("GPU", leaf.dtype, leaf.shape) if arrays.is_device_array(leaf) else None
