"""Staging: device arrays through host memory, for transports of the host.

An array is cut into blocks. While the ranks work on one block on the host, one stream
copies the next block to the host, and another copies the last result back, through
page-locked memory, which a GPU accesses at full speed and asynchronously.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm import packing
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.mpi import bytes_of
from mpidist.device.copies import HostCopies

_BLOCK_BYTES = 4 << 20


class _Block(NamedTuple):
    """One block of staging.

    Args:
      send: this rank's send buffer on the device, of one dimension.
      places: the destinations of the result on the device, piece by piece.
      work: called with `send` and memory for the result, both on the host. Collective.
    """

    send: Any
    places: Sequence[Any]
    work: Callable[[Any, Any], None]


class StagingTransport(Transport):
    """Copies to the host, lets another transport work there, and copies back.

    Args:
      host: the other transport.
      block_bytes: the block size.
    """

    name = "staging"
    device = True

    def __init__(self, host: Transport, block_bytes: int = _BLOCK_BYTES):
        self._host = host
        self.is_ordered = host.is_ordered
        self._block_bytes = block_bytes
        self._copies = HostCopies()

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        """See `Transport.allreduce`; packs on the device."""
        send = packing.pack(sends)

        def work(host_send: Any, host_receive: Any) -> None:
            self._host.allreduce([host_send], host_receive, deadline)

        # Blocks of the same size on all ranks, as sizes agree.
        send, receive = send.reshape(-1), receive.reshape(-1)
        blocks = (
            _Block(send[block], [receive[block]], work) for block in self._cut(receive)
        )
        self._run(blocks)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        width = send.dtype.itemsize
        send, receive = bytes_of(send), bytes_of(receive)
        sizes = [count * width for count in counts]
        starts = [0, *itertools.accumulate(sizes)][:-1]
        # A share for each rank, so that a block of all ranks fits in the pinned buffer.
        step = max(self._block_bytes // len(counts), 1)

        def blocks() -> Iterator[_Block]:
            # The largest rank decides the number of turns; others have empty pieces at
            # the end.
            for done in range(0, max(sizes), step):
                cuts = [(min(done, n), min(done + step, n)) for n in sizes]
                pieces = [
                    receive[start + low : start + high]
                    for start, (low, high) in zip(starts, cuts, strict=True)
                ]
                lengths = [piece.size for piece in pieces]

                # A default argument binds the lengths of this block, not those of the
                # last one.
                def work(
                    host_send: Any, result: Any, lengths: Sequence[int] = lengths
                ) -> None:
                    self._host.allgatherv(host_send, result, lengths, deadline)

                yield _Block(send[done : done + step], pieces, work)

        self._run(blocks())

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        """See `Transport.broadcast`."""

        def work(host_send: Any, result: Any) -> None:
            # The root's bytes come from its GPU; on other ranks the host buffer is
            # overwritten.
            result[...] = host_send
            self._host.broadcast(result, root, deadline)

        buffer = bytes_of(buffer)
        self._run(
            _Block(buffer[block], [buffer[block]], work) for block in self._cut(buffer)
        )

    def _cut(self, array: Any) -> Iterator[slice]:
        step = max(self._block_bytes // array.dtype.itemsize, 1)
        return (slice(k, k + step) for k in range(0, array.size, step))

    def _run(self, blocks: Iterator[_Block]) -> None:
        """Process blocks; each is copied while the previous one is processed."""
        # One block ahead: the next one is copied down while this one is on the
        # network.
        block, following = next(blocks, None), next(blocks, None)
        if block is None:
            # Empty on this rank means empty on all: nobody waits.
            return
        copies = self._copies
        copies.begin(is_alone=following is None)
        try:
            # `fetch` only begins the copy; `down.wait()` below ends it.
            down = next_down = copies.fetch(block.send)
            while block is not None:
                if following is not None:
                    next_down = copies.fetch(following.send)
                up = copies.room(sum(place.nbytes for place in block.places))
                result = up.bytes.view(np.dtype(block.places[0].dtype))
                # Here this rank waits for others; the GPU copies the next block
                # meanwhile.
                block.work(down.wait().view(np.dtype(block.send.dtype)), result)
                copies.send(up, block.places)
                block, following = following, next(blocks, None)
                # The copy back up runs while the next block is worked on.
                down = next_down
        finally:
            copies.end()
