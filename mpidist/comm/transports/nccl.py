"""NVIDIA's NCCL, for replicas that have a GPU each."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpidist.comm import packing
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.transports.base import Transport
from mpidist.comm.transports.mpi import bytes_of
from mpidist.device.streams import record

_CALL = "MirroredStrategy: NCCL"
_PAUSE_SECONDS = 1e-4
# A call of NCCL that takes longer waits for a rank that has died
_CALL_SECONDS = 5.0
_SUM = 0  # ncclSum
_SUCCESS, _NOT_READY = 0, 600  # cudaError_t
# ncclDataType_t, by NumPy's names
_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float32": 7,
    "float64": 8,
}
# Substitutes for dtypes that NCCL lacks. 16-bit integers are the last bits of wider
# sums; complex numbers are added as pairs of real numbers
_WIDER = {"int16": "int32", "uint16": "uint32"}
_PARTS = {"complex64": "float32", "complex128": "float64"}


def connect(consensus: Consensus) -> tuple[NcclTransport | None, str]:
    """Return a transport, or None and the reason. Collective.

    Args:
      consensus: of all ranks, each with a GPU of its own.
    """
    from cupy.cuda import nccl

    # Its first calls would wait for the other ranks regardless of the deadline
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")

    def number() -> tuple[Any, str]:
        try:
            return nccl.get_unique_id(), ""
        except Exception as error:
            return None, f"rank 0: {error}"

    unique_id, reason = consensus.root_only(_CALL, number)
    if reason:
        return None, reason
    comm = None
    try:
        with Pending("making a communicator of NCCL", consensus.comm):
            comm = nccl.NcclCommunicator(consensus.size, unique_id, consensus.rank)
    except Exception as error:  # of NCCL or CUDA: use MPI instead
        reason = f"rank {consensus.rank}: {error}"
    reasons = list(filter(None, consensus.gather_objects(_CALL, lambda: reason)))
    if reasons and comm is not None:
        with contextlib.suppress(
            nccl.NcclError
        ):  # it is unusable without the other ranks
            comm.abort()
    if reasons:
        return None, reasons[0]
    return NcclTransport(consensus, comm), ""


class NcclTransport(Transport):
    """Collectives on GPUs by NCCL, in the order of the current stream.

    With two communicators, all ranks would have to use them in the same order (NCCL's
    user guide), so each GPU has at most one.

    Args:
      consensus: of all ranks.
      comm: NCCL's communicator of these ranks; owned by the transport from now on.
    """

    name = "nccl"
    device = True

    def __init__(self, consensus: Consensus, comm: Any):
        from cupy.cuda import nccl

        self._consensus = consensus
        self._nccl = nccl
        self._comm = comm
        self._lock = threading.RLock()
        # Streams would wait for the GPUs of dead ranks for ever
        consensus.failures.on_failure(self._abort)

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._comm.destroy()

    def _abort(self) -> None:
        """Free the communicator at once. Any thread."""
        # It must not be freed during a call
        is_locked = self._lock.acquire(timeout=_CALL_SECONDS)
        try:
            self._comm.abort()
        finally:
            if is_locked:
                self._lock.release()

    @contextlib.contextmanager
    def _using(self) -> Iterator[Any]:
        """Yield the communicator, protected from an abort by another thread."""
        failures = self._consensus.failures
        try:
            with self._lock:
                failures.require_none()
                yield self._comm
        except self._nccl.NcclError as error:
            failures.wait_for_names()  # NCCL may know of a death before MPI does
            failures.require_none(error)
            raise

    def allreduce(
        self,
        sends: Sequence[Any],
        receive: Any,
        deadline: float | None,
        wire: np.dtype[Any] | None = None,
    ) -> None:
        send = packing.pack(sends)
        name = np.dtype(send.dtype).name
        if name in _WIDER:
            wide = send.astype(_WIDER[name])
            total = wide.copy()
            self._sum(wide, total, deadline)
            receive[...] = total.astype(send.dtype).reshape(receive.shape)
        elif name in _PARTS:
            part = _PARTS[name]
            self._sum(
                send.reshape(-1).view(part), receive.reshape(-1).view(part), deadline
            )
        else:
            self._sum(send, receive, deadline)

    def _sum(self, send: Any, receive: Any, deadline: float | None) -> None:
        kind = _TYPES[np.dtype(send.dtype).name]
        addresses = send.data.ptr, receive.data.ptr
        with self._using() as comm:
            comm.allReduce(*addresses, send.size, kind, _SUM, _stream())
        self._wait("all_reduce", deadline)

    def allgatherv(
        self, send: Any, receive: Any, counts: Sequence[int], deadline: float | None
    ) -> None:
        """See `Transport.allgatherv`: each rank broadcasts, all at the same time."""
        width = send.dtype.itemsize
        send, receive = bytes_of(send), bytes_of(receive)
        sizes = [count * width for count in counts]
        starts = [0, *itertools.accumulate(sizes)]
        kind, stream = _TYPES["uint8"], _stream()
        with self._using() as comm:
            self._nccl.groupStart()
            try:
                for root, (start, size) in enumerate(zip(starts, sizes)):
                    to = receive.data.ptr + start
                    if size:
                        comm.broadcast(send.data.ptr, to, size, kind, root, stream)
            finally:
                self._nccl.groupEnd()
        self._wait("all_gather", deadline)

    def broadcast(self, buffer: Any, root: int, deadline: float | None) -> None:
        address, kind = buffer.data.ptr, _TYPES["uint8"]
        with self._using() as comm:
            comm.broadcast(address, address, buffer.nbytes, kind, root, _stream())
        self._wait("broadcast", deadline)

    def _wait(self, operation: str, deadline: float | None) -> None:
        """Wait for the GPUs; without a deadline, return at once."""
        if deadline is None:
            return
        from cupy.cuda import runtime

        done = record()
        # Not `done.done`, which is False after an error of CUDA, too
        while (status := runtime.eventQuery(done.ptr)) != _SUCCESS:
            if status != _NOT_READY:
                runtime.check_status(status)
            with self._using() as comm:
                comm.check_async_error()
            if time.monotonic() > deadline:
                self._abort()
                self._consensus.give_up(operation, deadline)
            time.sleep(_PAUSE_SECONDS)


def _stream() -> int:
    import cupy

    return int(cupy.cuda.get_current_stream().ptr)
