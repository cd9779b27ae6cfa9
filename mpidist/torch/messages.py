"""Messages between two ranks, which are compared when they are received.

MPI moves bytes and does not say of what. So each message begins with a header: the
dtype, the size, and a number, under which a large one's bytes follow by themselves.
"""

from __future__ import annotations

import collections
import datetime
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.waiting import Departures, abandon
from mpidist.errors import ArgumentError, DeadlineError, MismatchError
from mpidist.torch.flat_tensors import FlatTensor
from mpidist.torch.works import Work, limit

_SPIN_SECONDS, _PAUSE_SECONDS = 1e-4, 1e-3
_DTYPES = sorted({str(v) for v in vars(torch).values() if type(v) is torch.dtype})
_HEADER = np.dtype([("dtype", "i8"), ("nbytes", "i8"), ("number", "i8")])
# Larger ones are not copied behind their header
_INLINE_BYTES = 16 << 10
_NUMBERS = 16000  # MPI's tags reach to 32767 at least


class Messages:
    """The messages of one process group. Collective to create.

    Args:
      comm: the ranks; duplicated.
      departures: of them.
    """

    def __init__(self, comm: MPI.Intracomm, departures: Departures):
        self.comm, self._departures = comm.Dup(), departures
        self._most_tag = (self.comm.Get_attr(MPI.TAG_UB) or 32767) // 2
        self._numbers: collections.Counter[int] = collections.Counter()
        self._running: list[Message] = []  # whose memory MPI may still use

    def send(self, flat: FlatTensor, rank: int, tag: int, *rest: Any) -> Message:
        """Send a tensor to a rank. Not collective."""
        number = self._numbers[rank] = (self._numbers[rank] + 1) % _NUMBERS
        is_inline = flat.nbytes <= _INLINE_BYTES
        header = np.array((_code_of(flat), flat.nbytes, number), _HEADER)
        parts = header.tobytes(), flat.bytes if is_inline else b""
        first = self.comm.Isend([b"".join(parts), MPI.BYTE], rank, self._tag(tag))
        requests = [first]
        if not is_inline:
            payload = [flat.bytes, MPI.BYTE]
            requests.append(self.comm.Isend(payload, rank, 2 * number + 1))
        return self._started("send", requests.pop(0), lambda _: _pop(requests), *rest)

    def receive(self, flat: FlatTensor, rank: int, tag: int, *rest: Any) -> Message:
        """Receive a tensor from a rank, or from any. Not collective."""
        buffer = np.empty(_HEADER.itemsize + _INLINE_BYTES, np.uint8)
        request = self.comm.Irecv([buffer, MPI.BYTE], rank, self._tag(tag))
        return self._started("recv", request, _Receiver(self.comm, flat, buffer), *rest)

    def _tag(self, tag: int) -> int:
        if not 0 <= tag <= self._most_tag:
            raise ArgumentError(f"tag must be from 0 to {self._most_tag}, not {tag}")
        return 2 * tag

    def _started(
        self, name: str, request: MPI.Request, end: Any, seconds: float | None, out: Any
    ) -> Message:
        outputs = [out] if isinstance(out, torch.Tensor) else list(out)
        message = Message(
            name, self.comm, self._departures, seconds, outputs, request, end
        )
        self._running = [m for m in self._running if not m.is_completed()]
        self._running.append(message)
        message.progress = self._progress
        return message

    def _progress(self) -> None:
        """Take parts of all messages that have arrived: others may wait for that."""
        for message in list(self._running):
            message.is_completed()

    def stop(self) -> None:
        """End the threads of futures, before MPI ends."""
        for message in self._running:
            message.stop()


def free(comm: MPI.Intracomm) -> None:
    """Free a communicator of messages. Collective."""
    # MPICH delivers what nobody has received to the next communicator
    status = MPI.Status()
    while found := comm.Improbe(status=status):
        found.Recv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])
    comm.Free()


def _code_of(flat: FlatTensor) -> int:
    return _DTYPES.index(str(flat.tensor.dtype))


def _pop(requests: list[MPI.Request]) -> MPI.Request | None:
    return requests.pop() if requests else None


class _Receiver:
    """Takes the parts of a message as they arrive."""

    def __init__(self, comm: MPI.Intracomm, flat: FlatTensor, buffer: Any):
        self._comm, self._flat, self._buffer = comm, flat, buffer
        self._error: str | None = None
        self._is_last = False

    def __call__(self, status: MPI.Status) -> MPI.Request | None:
        flat = self._flat
        if not self._is_last:
            self._is_last = True
            header, inline = np.split(self._buffer, [_HEADER.itemsize])
            code, nbytes, number = header.view(_HEADER)[0].tolist()
            is_right = (code, nbytes) == (_code_of(flat), flat.nbytes)
            if not is_right:
                self._error = (
                    f"recv: rank {status.Get_source()} has sent {nbytes} bytes of "
                    f"{_DTYPES[code]} to rank {self._comm.Get_rank()}, whose tensor "
                    f"has {flat.nbytes} of {flat.tensor.dtype}"
                )
            if nbytes > _INLINE_BYTES:  # the rest must be taken in any case
                target = flat.bytes if is_right else np.empty(nbytes, np.uint8)
                tag = 2 * number + 1
                return self._comm.Irecv([target, MPI.BYTE], status.Get_source(), tag)
            if is_right:
                flat.bytes[...] = inline[:nbytes]
        if self._error is not None:
            raise MismatchError(self._error)
        flat.store()
        return None


class Message(Work):
    """A message to or from one rank, which ends when MPI says so.

    Args:
      name: the operation.
      comm: the communicator.
      departures: of its ranks.
      seconds: the timeout of the group.
      outputs: see `Work`.
      request: of MPI; it is running.
      end: called with the status when it has ended; returns another request, if the
        message has one more part.
    """

    def __init__(
        self,
        name: str,
        comm: MPI.Intracomm,
        departures: Departures,
        seconds: float | None,
        outputs: list[Any],
        request: MPI.Request | None,
        end: Callable[[MPI.Status], MPI.Request | None],
    ):
        super().__init__(outputs)
        self._name, self._comm, self._departures = name, comm, departures
        self._seconds, self._end = seconds, end
        self._request: MPI.Request | None = request
        self._status = MPI.Status()
        self._testing = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._is_stopped = False
        self.progress: Callable[[], None] = lambda: None  # of all messages

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        with self._testing:
            if not super().is_completed():
                self._test()
        return super().is_completed()

    def _test(self) -> None:
        error: Exception | None = None
        try:
            while self._request is not None:
                if not self._request.Test(self._status):
                    return
                self._request = self._end(self._status)
        except Exception as caught:
            error = caught
        del self._end  # it holds the tensors
        self.finish(error)

    def get_future(self) -> Any:
        """Return a future of the tensors, which a thread of its own completes."""
        if self._watcher is None and not self.is_completed():
            self._watcher = threading.Thread(target=self._watch, daemon=True)
            self._watcher.start()
        return super().get_future()

    def _watch(self) -> None:
        try:
            self._poll(self._seconds)
        except Exception as error:
            with self._testing:
                if not super().is_completed():
                    self.finish(error)

    def stop(self) -> None:
        """End the thread of the future, before MPI ends."""
        self._is_stopped = True
        if self._watcher is not None:
            self._watcher.join()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the message; raise if it has another size."""
        if not self.is_completed():
            with Pending(self._name, self._comm):
                self._poll(limit(timeout) or self._seconds)
        return super().wait()

    def _poll(self, seconds: float | None) -> None:
        begin = now = time.monotonic()
        while not (self.is_completed() or self._is_stopped):
            if now - begin < _SPIN_SECONDS:
                os.sched_yield()
            else:
                self._departures.require_none()
                self.progress()
                time.sleep(min((now - begin) / 4, _PAUSE_SECONDS))
            now = time.monotonic()
            if seconds is not None and now - begin > seconds:
                if self._request is not None:
                    abandon(self._request)
                raise DeadlineError(f"{self._name} has not ended in {seconds:g} s")

    def _source_rank(self) -> int:
        return self._status.Get_source()

    source_rank = _source_rank
