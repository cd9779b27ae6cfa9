"""Ring gathers and broadcasts of large arrays between nodes.

All ranks send to the next rank and receive from the previous one at the same time, so
that every link carries each byte once, for any lengths (P. Patarasu and X. Yuan,
Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009, do the same
for sums). The ranks of a node are neighbours. A part does not come back to its own
node: its rank sends it to the ranks before it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.signatures import Tag
from mpidist.comm.transports.blocks import InFlight, pieces_of
from mpidist.comm.transports.mpi import MpiTransport, bytes_of

_MOST_PIECES = 4096  # of one array


class RingTransport(MpiTransport):
    """Sends arrays around a ring of all ranks; reduces like direct MPI.

    Collective to make.

    Args:
      consensus: of all ranks.
    """

    name = "ring"

    def __init__(self, consensus: Consensus):
        super().__init__(consensus)
        nodes = consensus.gather_objects("RingTransport", MPI.Get_processor_name)
        # The lowest rank of a node identifies it.
        lowest: dict[str, int] = {}
        self._nodes = [lowest.setdefault(name, r) for r, name in enumerate(nodes)]
        # Ranks of a node are neighbours in the ring, so each node is entered and left
        # once.
        ring = [r for _, r in sorted(zip(self._nodes, range(consensus.size)))]
        place = ring.index(consensus.rank)
        # To the ranks before this one; for the last rank of a node, to the next in the
        # ring
        self._backwards = [ring[place - distance] for distance in range(len(ring))]
        self._node_ranks = [
            r for r in ring if self._nodes[r] == self._nodes[consensus.rank]
        ]

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        width, receive = send.dtype.itemsize, bytes_of(receive)
        ends = [end * width for end in itertools.accumulate(counts)]
        edges = itertools.pairwise([0, *ends])
        parts = [receive[start:end] for start, end in edges]
        parts[self._consensus.rank][...] = bytes_of(send)
        self._pass_on(parts, deadline, "all_gather")

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        data = bytes_of(buffer)
        # Broadcast is an allgather in which all parts but the root's are empty.
        parts = [data[:0]] * self._consensus.size
        parts[root] = data
        self._pass_on(parts, deadline, "broadcast")

    def _pass_on(
        self, parts: Sequence[Any], deadline: float | None, operation: str
    ) -> None:
        # Requests stay in `flight` if a wait raises: their buffers must outlive them.
        comm, consensus, flight = self._comm, self._consensus, InFlight()
        wait = functools.partial(consensus.wait, deadline=deadline, operation=operation)
        consensus.departures.require_none()
        own, previous = self._backwards[:2]
        following = self._backwards[-1]

        # All receives are posted before anything is sent.
        def receive(rank: int, source: int, tag: int) -> list[Any]:
            pieces = pieces_of(parts[rank], _MOST_PIECES)
            begun = [comm.Irecv([piece, MPI.BYTE], source, tag) for piece in pieces]
            flight.requests += begun
            return list(zip(pieces, begun, strict=True))

        def send(piece: Any, rank: int, tag: int) -> None:
            flight.requests.append(comm.Isend([piece, MPI.BYTE], rank, tag))

        coming = []
        # In the order in which they arrive: the nearest rank behind this one comes
        # first.
        for rank in self._backwards[1:]:
            if self._is_sent_back(rank, own):
                receive(rank, rank, Tag.RING_IN_NODE)
            else:
                is_passed = not self._is_sent_back(rank, following)
                coming += [(*p, is_passed) for p in receive(rank, previous, Tag.RING)]
        for piece in pieces_of(parts[own], _MOST_PIECES):
            if not self._is_sent_back(own, following):
                send(piece, following, Tag.RING)
            for rank in self._node_ranks:
                if rank < own:
                    send(piece, rank, Tag.RING_IN_NODE)
        for piece, request, is_passed in coming:
            # Piece by piece: each is forwarded as soon as it arrives, while the next
            # one arrives.
            wait(request)
            if is_passed:
                send(piece, following, Tag.RING)
        flight.wait_for_all(wait)

    def _is_sent_back(self, source: int, rank: int) -> bool:
        """Return whether `source` sends its part to `rank` directly, not by the ring.

        It does to the ranks of its node before it, and to itself.
        """
        return self._nodes[source] == self._nodes[rank] and rank <= source
