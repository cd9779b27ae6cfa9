"""Sums over all ranks of compared arrays: choice of transport, packs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpidist.comm import arithmetic, packing
from mpidist.comm.collectives.arguments import deadline_of, implementation_of, is_direct
from mpidist.comm.collectives.outputs import Results
from mpidist.comm.shared_memory.symmetric import SymmetricMemory
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.selector import NarrowingTransport, TransportSelector
from mpidist.device import arrays
from mpidist.options import CommunicationOptions

__all__ = ["Sums"]


class _Pack(NamedTuple):
    """Arrays of one dtype that are summed together, and memory for their sums.

    Args:
      members: their positions among the arrays that were passed.
      sends: these arrays.
      total: memory for their sums, concatenated.
      transport: the transport; None if they are in shared memory of the node.
      wire: the dtype in which it sends them; None for their own.
    """

    members: Sequence[int]
    sends: Sequence[Any]
    total: Any
    transport: Transport | None
    wire: Any = None


class Sums:
    """The sums of one strategy. Methods that sum are collective.

    Args:
      ranks: how many there are.
      transports: the transports.
      symmetric: the arrays that lie in memory of the node.
      results: gives memory for what is returned.
    """

    def __init__(
        self,
        ranks: int,
        transports: TransportSelector,
        symmetric: SymmetricMemory,
        results: Results,
    ):
        self._ranks = ranks
        self._transports = transports
        self._symmetric = symmetric
        self._results = results

    def transport(
        self, options: CommunicationOptions, is_ordered: bool, is_device: bool
    ) -> Transport:
        """Return the transport that options ask for."""
        return self._transports.pick(implementation_of(options), is_ordered, is_device)

    def place_of(self, given: Sequence[Any], options: CommunicationOptions) -> int:
        """Return `SymmetricMemory.place_of` if it helps that arrays are symmetric."""
        in_node = self._transports.intra_node
        # In-place reduction only helps where the transport is the node's own and
        # numbers keep their width.
        if in_node is None or is_direct(options) or options.compression:
            return 0
        # Reproducible sums need the order of the ranks, which not every transport
        # keeps.
        if options.reproducible and not in_node.is_ordered:
            return 0
        return self._symmetric.place_of(given)

    def prepare(
        self,
        values: Sequence[Any],
        options: CommunicationOptions,
        transport: Transport | None = None,
        is_symmetric: bool = False,
    ) -> Callable[[], list[Any]]:
        """Reserve memory; return what sums contiguous arrays over all ranks.

        The sums are arrays of our own. float16 and bfloat16 are added up in float32,
        which the sums have then. Arguments and errors: see `reserve`.
        """
        # A copy: results never alias arguments.
        if self._ranks == 1:
            copies = [value.copy() for value in values]
            return lambda: copies
        packs = self.reserve(values, options, transport, is_symmetric)
        return functools.partial(self.sum_packs, packs, options)

    def reserve(
        self,
        values: Sequence[Any],
        options: CommunicationOptions,
        transport: Transport | None = None,
        is_symmetric: bool = False,
    ) -> list[_Pack]:
        """Allocate memory for sums, and choose the transport. Not collective.

        Errors of one rank alone are raised here, before the comparison.

        Args:
          values: contiguous arrays.
          options: see `CommunicationOptions`.
          transport: what moves them, if it can.
          is_symmetric: whether to leave those that are symmetric where they lie.
        """
        near: list[int] = []
        if is_symmetric:
            # Those in symmetric memory, which all ranks of the node read where they
            # lie.
            places = map(self._symmetric.everyone, values)
            near = [j for j, place in enumerate(places) if place is not None]
        far = [j for j in range(len(values)) if j not in set(near)]
        packs = []
        for chosen, size_bytes in ((near, 0), (far, options.bytes_per_pack)):
            given = [values[j] for j in chosen]
            sizes = [value.nbytes for value in given]
            for numbers in packing.groups(given, sizes, size_bytes):
                sends = [given[k] for k in numbers]
                # Sums of 16-bit floats are accumulated in float32; see
                # `Transport.allreduce_sum`.
                dtype = arithmetic.accumulator_of(sends[0])
                size = sum(send.size for send in sends)
                total = self._results.empty(size, sends[0], dtype)
                members = [chosen[k] for k in numbers]
                wire = None
                way: Transport | None = self._narrowing(sends[0], options)
                if way is not None:
                    wire = arithmetic.wire_dtype(sends[0].dtype, options.compression)
                elif chosen is far:
                    way = self._transport_for(sends[0], options, transport)
                packs.append(_Pack(members, sends, total, way, wire))
        return packs

    def _narrowing(
        self, send: Any, options: CommunicationOptions
    ) -> NarrowingTransport | None:
        """Return the transport that compresses an array, if requested."""
        if options.compression is None or arrays.is_device_array(send):
            return None
        # Integers and 16-bit numbers would not become narrower.
        if send.dtype.kind != "f" or send.dtype.itemsize <= 2:
            return None
        return self._transports.narrowing(
            implementation_of(options), options.reproducible
        )

    def _transport_for(
        self, send: Any, options: CommunicationOptions, transport: Transport | None
    ) -> Transport:
        is_ordered = options.reproducible or arrays.is_float16(send.dtype)
        is_device = arrays.is_device_array(send)
        way = transport
        # A transport that was chosen for all is replaced where it cannot do this pack.
        if way is None or way.device != is_device or (is_ordered > way.is_ordered):
            way = self.transport(options, is_ordered, is_device)
        return way

    def sum_packs(
        self, packs: Sequence[_Pack], options: CommunicationOptions
    ) -> list[Any]:
        """Return the sums of the arrays that were passed to `reserve`. Collective."""
        totals: dict[int, Any] = {}
        deadline = deadline_of(options)
        near = []
        for pack in packs:
            if pack.transport is not None:
                self._sum_pack(pack, pack.transport, deadline)
            shapes = [send.shape for send in pack.sends]
            parts = packing.unpack(pack.total, shapes)
            for j, send, part in zip(pack.members, pack.sends, parts, strict=True):
                totals[j] = part
                if pack.transport is None:
                    near.append((send, part))
        if near:
            self._sum_symmetric(near, deadline)
        return [totals[j] for j in range(len(totals))]

    def _sum_pack(
        self, pack: _Pack, transport: Transport, deadline: float | None
    ) -> None:
        """Put the sums of arrays of one dtype into their memory."""
        dtype = pack.sends[0].dtype
        if pack.wire is not None:
            assert isinstance(transport, NarrowingTransport)
            self._transports.count(transport.name, pack.total.nbytes)
            transport.allreduce_narrow(pack.sends, pack.total, pack.wire, deadline)
            return
        transport.allreduce_packed(pack.sends, pack.total, deadline)
        if arrays.is_float16(dtype):  # totals may have been, on the way, so all are
            arithmetic.round_to(dtype, pack.total)

    def _sum_symmetric(
        self, pairs: Sequence[tuple[Any, Any]], deadline: float | None
    ) -> None:
        """Put the sums of symmetric arrays into others."""
        everyone = [self._symmetric.everyone(send) for send, _ in pairs]
        in_node, totals = self._transports.intra_node, [total for _, total in pairs]
        assert in_node is not None
        self._transports.count(in_node.name, sum(total.nbytes for total in totals))
        in_node.allreduce_symmetric(
            [found for found in everyone if found is not None], totals, deadline
        )
