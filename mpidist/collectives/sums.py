"""Sums over all ranks of arrays that are known to agree: the way, the packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist import arrays, packing
from mpidist.collectives.options_of import deadline_of, implementation_of, is_direct
from mpidist.collectives.results import Results
from mpidist.memory.symmetric import SymmetricMemory
from mpidist.options import CommunicationOptions
from mpidist.transports import Routes, Transport

__all__ = ["Sums"]


class Sums:
    """The sums of one strategy. Methods that sum are collective.

    Args:
      ranks: how many there are.
      routes: the transports.
      symmetric: the arrays that lie in memory of the node.
      results: gives memory for what is returned.
    """

    def __init__(
        self,
        ranks: int,
        routes: Routes,
        symmetric: SymmetricMemory,
        results: Results,
    ):
        self._ranks = ranks
        self._routes = routes
        self._symmetric = symmetric
        self._results = results

    def transport(
        self, options: CommunicationOptions, is_ordered: bool, is_device: bool
    ) -> Transport:
        """Return the transport that options ask for."""
        return self._routes.pick(implementation_of(options), is_ordered, is_device)

    def place_of(self, given: Sequence[Any], options: CommunicationOptions) -> int:
        """Return `SymmetricMemory.place_of` if it helps that arrays are symmetric."""
        in_node = self._routes.in_node
        if in_node is None or is_direct(options) or options.compression:
            return 0
        if options.reproducible and not in_node.is_ordered:
            return 0
        return self._symmetric.place_of(given)

    def sum_arrays(
        self,
        values: Sequence[Any],
        options: CommunicationOptions,
        transport: Transport | None = None,
    ) -> list[Any]:
        """Return the sums over all ranks of contiguous arrays, as arrays of our own.

        float16 and bfloat16 are added up in float32, which the sums have then.
        """
        if self._ranks == 1:
            return [value.copy() for value in values]
        totals: list[Any] = [None] * len(values)
        sizes = [value.nbytes for value in values]
        for members in packing.groups(values, sizes, options.bytes_per_pack):
            sends = [values[j] for j in members]
            total = self._sum_pack(sends, options, transport)
            shapes = [send.shape for send in sends]
            for j, part in zip(members, packing.unpack(total, shapes), strict=True):
                totals[j] = part
        return totals

    def _sum_pack(
        self,
        sends: Sequence[Any],
        options: CommunicationOptions,
        transport: Transport | None,
    ) -> Any:
        """Return the sums of arrays of one dtype, one behind the other."""
        size, dtype = sum(send.size for send in sends), sends[0].dtype
        is_narrow = arrays.is_float16(dtype)
        is_ordered = options.reproducible or is_narrow
        is_device = arrays.is_device_array(sends[0])
        way = transport
        if way is None or way.device != is_device or (is_ordered > way.is_ordered):
            way = self.transport(options, is_ordered, is_device)
        total = self._results.empty(size, sends[0], np.float32 if is_narrow else None)
        with np.errstate(over="ignore"):  # what is too large for float16 is inf
            way.allreduce_packed(sends, total, deadline_of(options))
            if is_narrow:  # totals may have been, on the way, so all are
                total = total.astype(dtype).astype(np.float32)
        return total

    def sum_symmetric(
        self, values: Sequence[Any], options: CommunicationOptions
    ) -> list[Any]:
        """Do what `sum_arrays` does where some arrays are symmetric, on all ranks."""
        everyone = [self._symmetric.everyone(value) for value in values]
        near = [j for j, found in enumerate(everyone) if found is not None]
        far = [j for j, found in enumerate(everyone) if found is None]
        totals: list[Any] = [None] * len(values)
        # One piece of memory for all of a dtype: it may be that of former results
        sizes = [values[j].nbytes for j in near]
        for members in packing.groups([values[j] for j in near], sizes, 0):
            own = [near[k] for k in members]
            size = sum(values[j].size for j in own)
            total = self._results.empty(size, values[own[0]])
            shapes = [values[j].shape for j in own]
            for j, part in zip(own, packing.unpack(total, shapes), strict=True):
                totals[j] = part
        assert self._routes.in_node is not None
        self._routes.in_node.allreduce_symmetric(
            [found for found in everyone if found is not None],
            [totals[j] for j in near],
            deadline_of(options),
        )
        others = self.sum_arrays([values[j] for j in far], options)
        for j, total in zip(far, others, strict=True):
            totals[j] = total
        return totals
