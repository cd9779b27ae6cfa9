"""A backend of torch.distributed over MPI, for `init_process_group("mpidist")`.

All that PyTorch builds on process groups runs over it: DistributedDataParallel, FSDP,
distributed checkpoints, DTensor. Before data move, the ranks compare their calls, so a
difference is an error on all ranks instead of a hang or wrong numbers. Collectives run
in the order in which PyTorch issues them, in a thread, so that they overlap with the
backward pass.
"""

from __future__ import annotations

import atexit
import contextvars
import ctypes
import datetime
import functools
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import CallSignature, digest, skip_folder
from mpidist.comm.consensus.waiting import Departures
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    DeadlineError,
    DTypeError,
    MismatchError,
    UnsupportedError,
)
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.strategy.strategy import Strategy
from mpidist.torch import c10d

__all__ = ["Operations", "ProcessGroupOptions", "group_of", "register"]

BACKEND = "mpidist"
_CALL = f"init_process_group({BACKEND!r})"
# Larger arrays are reduced where they lie; smaller ones travel with the comparison
_IN_PLACE_BYTES = 128 << 10
_AUTO = CommunicationImplementation.AUTO
_SPIN_SECONDS, _PAUSE_SECONDS = 1e-4, 1e-3
_REDUCE_OPS = {
    "SUM": ReduceOp.SUM,
    "AVG": ReduceOp.MEAN,
    "MIN": ReduceOp.MIN,
    "MAX": ReduceOp.MAX,
    "PRODUCT": ReduceOp.PRODUCT,
}
_BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
# In which booleans, as bytes of 0 and 1, are reduced
_OF_BOOLEANS = {"SUM": "MAX", "PRODUCT": "MIN"}
_IN_PLACE_DTYPES = {torch.float32, torch.float64, torch.complex64, torch.complex128}


class ProcessGroupOptions(NamedTuple):
    """Options for `init_process_group("mpidist", pg_options=...)`.

    Args:
      communicator: the ranks; None for COMM_WORLD. Pass `store`, `rank` and
        `world_size` with it.
    """

    communicator: MPI.Intracomm | None = None


class _Work(dist.Work):
    """An operation that a thread runs.

    Args:
      outputs: the tensors that it writes.
    """

    def __init__(self, outputs: list[Any], source: int = -1):
        super().__init__()
        self._outputs = outputs
        self._running = threading.Lock()
        self._running.acquire()
        self._mutex = threading.Lock()
        self._error: BaseException | None = None
        self._future: Any = None
        self._starting: Any = None
        self.source = source

    def finish(self, error: BaseException | None = None) -> None:
        """End the operation, by an error of this rank if there is one."""
        with self._mutex:
            self._error = error
            self._running.release()
            starting = self._starting
        if starting is not None:
            starting.set_result(None)

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the end; raise the operation's error."""
        seconds = -1.0 if timeout is None else timeout.total_seconds()
        if not self._running.acquire(timeout=seconds if seconds > 0 else -1):
            raise ContextError(f"the operation has not ended in {seconds:g} s")
        self._running.release()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait for the end."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the operation has ended."""
        return not self._running.locked()

    def is_success(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the operation's error."""
        return self._error

    def result(self) -> list[Any]:
        """Wait for the end; return the tensors that were written."""
        self.wait()
        return self._outputs

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank

    def get_future(self) -> Any:
        """Return a future of the tensors. An error of the operation is its error."""
        with self._mutex:
            if self._future is None:
                self._starting = torch.futures.Future()
                # What a callback raises becomes the error of its future in C++, too
                self._future = self._starting.then(self._value)
                if self.is_completed():
                    self._starting.set_result(None)
            return self._future

    def _value(self, _: Any) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._outputs


class _Message(_Work):
    """A message to or from one rank: complete when MPI says so.

    Args:
      group: of the ranks.
      post: starts it, and returns the request.
      end: called with the status when it has arrived.
    """

    def __init__(
        self,
        name: str,
        departures: Departures,
        comm: MPI.Intracomm,
        outputs: list[Any],
        request: MPI.Request,
        end: Callable[[MPI.Status], None],
    ):
        super().__init__(outputs)
        self._name, self._departures, self._comm = name, departures, comm
        self._request, self._end = request, end
        self._status = MPI.Status()

    def is_completed(self) -> bool:
        """Return whether the message has arrived."""
        if super().is_completed():
            return True
        if self._request.Test(self._status):
            self._complete()
        return super().is_completed()

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait for the message; raise if it has another size."""
        if not super().is_completed():
            deadline = None
            if timeout is not None and timeout.total_seconds() > 0:
                deadline = time.monotonic() + timeout.total_seconds()
            with Pending(self._name, self._comm):
                self._poll(deadline)
        return super().wait()

    def _poll(self, deadline: float | None) -> None:
        begin = now = time.monotonic()
        while not self.is_completed():
            if now - begin < _SPIN_SECONDS:
                os.sched_yield()
            else:
                self._departures.require_none()
                time.sleep(min((now - begin) / 4, _PAUSE_SECONDS))
            now = time.monotonic()
            if deadline is not None and now > deadline:
                raise DeadlineError(f"{self._name} has not ended in time")

    def _complete(self) -> None:
        error: BaseException | None = None
        try:
            self._end(self._status)
        except Exception as caught:
            error = caught
        self.finish(error)


class _Executor:
    """Runs the operations of one process group in the order of their submission."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.Lock()  # held by who runs an operation
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = 0
        self._mutex = threading.Lock()
        self._thread: threading.Thread | None = None

    def submit(self, work: _Work, run: Callable[[], None], may_wait: bool) -> None:
        """Run an operation, at once if `may_wait` and no other one is in the way."""
        with self._mutex:
            is_first = self._waiting == 0
            self._waiting += 1
            if may_wait and is_first:
                self._turn.acquire()
            else:
                may_wait = False
                self._queue.put((work, run))
                if self._thread is None:
                    self._start()
        if may_wait:
            self._run(work, run)
            self._turn.release()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while (item := self._queue.get()) is not None:
            with self._turn:
                self._run(*item)
            del item

    def _run(self, work: _Work, run: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            run()
        except BaseException as caught:
            error = caught
        with self._mutex:
            self._waiting -= 1
        work.finish(error)

    def close(self) -> None:
        """Wait for all operations; end the thread."""
        with self._mutex:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()


class Operations:
    """The operations of one process group over MPI. Collective to create.

    Tensors are on the CPU. Operations are those of `torch.distributed`; each is
    collective but `send` and `recv`. Sums of float16 and bfloat16 are formed in
    float32. Ranks may differ in nothing that the operation needs to be equal.

    Args:
      comm: the ranks; duplicated.
      timeout: for each operation; PyTorch's default for none but
        MPIDIST_HANG_SECONDS.

    Raises, from each operation and on all ranks:
      DivergenceError: the ranks call different operations.
      MismatchError: dtypes, sizes, roots or reductions differ.
      DTypeError: a dtype cannot be reduced in this way.
      UnsupportedError: a sparse tensor, or one that is not on the CPU.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: datetime.timedelta | None = None):
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._group = ReplicaGroup(["CPU:0"], communicator=comm)
        self._consensus = self._group.consensus
        self._collectives = self._group.collectives
        self._transports = self._collectives.transports
        self._messages = comm.Dup()
        self._executor = _Executor(f"mpidist-process-group-{next(_numbers)}")
        self._timeout = timeout
        self._calls = 0
        self._creator = threading.get_ident()
        _finish_at_exit()

    # What c10d asks of a backend beside operations

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that users pass to `init_process_group`."""
        return BACKEND

    def name(self) -> str:
        """Return the name of the backend."""
        return BACKEND

    def size(self) -> int:
        """Return the number of ranks."""
        return self._size

    def rank(self) -> int:
        """Return this rank."""
        return self._rank

    def setTimeout(self, timeout: datetime.timedelta) -> None:  # noqa: N802
        """Set the timeout of all later operations."""
        self._timeout = timeout

    set_timeout = _set_default_timeout = setTimeout

    def setSequenceNumberForGroup(self) -> None:  # noqa: N802
        """Do nothing: the ranks compare all calls."""

    def getSequenceNumberForGroup(self) -> int:  # noqa: N802
        """Return how many collectives this rank has called."""
        return self._calls

    _set_sequence_number_for_group = setSequenceNumberForGroup
    _get_sequence_number_for_group = getSequenceNumberForGroup

    def finish(self) -> None:
        """Wait for this rank's operations. Not collective."""
        self._executor.close()

    def shutdown(self) -> None:
        """Wait for this rank's operations, the last ones. Not collective."""
        self.finish()
        self._consensus.retire()
        c10d.withdraw(self)

    abort = shutdown

    # Operations

    def allreduce(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """Reduce a tensor over all ranks, in place."""
        return self._reduce_each("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """Reduce tensors over all ranks, in place."""
        return self._reduce_each("all_reduce_coalesced", tensors, opts)

    def _reduce_each(self, name: str, tensors: Sequence[Any], opts: Any) -> Any:
        op = _Reduction.of(opts)

        def run(timeout: float | None) -> None:
            for tensor in _listed(tensors):
                array = self._guard(name, _Flat, tensor)
                self._reduce(name, op, array, array, timeout)
                array.store()

        return self._submit(name, run, _listed(tensors), opts)

    def reduce(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """Reduce a tensor over all ranks, in place on rank `opts.rootRank`."""
        op, root = _Reduction.of(opts), _root_of(opts)

        def run(timeout: float | None) -> None:
            for tensor in _listed(tensors):
                array = self._guard("reduce", _Flat, tensor)
                total = self._guard("reduce", array.copy)
                self._reduce("reduce", op, array, total, timeout, ("root", root))
                if self._rank == root:
                    array.bytes[...] = total.bytes
                    array.store()

        return self._submit("reduce", run, _listed(tensors), opts)

    def _reduce(
        self,
        name: str,
        op: _Reduction,
        source: _Flat,
        total: _Flat,
        timeout: float | None,
        *fields: tuple[str, Any],
    ) -> None:
        """Put the reduction of `source` into `total`, which may be the same."""
        fields = (("reduce_op", op.name), *fields)
        if op.name in _BITWISE:
            everyone = self._guard(name, op.reserve, source, self._size)
            self._compare(name, (*fields, *source.fields), timeout)
            self._gather(source.array, everyone, [source.size] * self._size, timeout)
            _BITWISE[op.name].reduce(everyone, axis=0, out=total.array)
            return
        known, array = self._guard(name, op.prepare, source)
        is_sum = known is ReduceOp.SUM or known is ReduceOp.MEAN
        if is_sum and source.nbytes > _IN_PLACE_BYTES and source.adds_in_place:
            self._compare(name, (*fields, *source.fields), timeout)
            if self._size > 1:
                way = self._transports.pick(_AUTO, False, False)
                way.allreduce_sum(array, total.array, _deadline(timeout))
            if known is ReduceOp.MEAN:
                total.array /= self._size
            return
        options = CommunicationOptions(timeout_seconds=timeout)
        named = f"{name} of {op.name}{''.join(f', {k} {v}' for k, v in fields[1:])}"
        found = self._collectives.all_reduce(named, known, array, options)
        total.array[...] = op.of_sum(found, source, self._size)

    def broadcast(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """Copy tensors of rank `opts.rootRank` to all ranks."""
        root = _root_of(opts)

        def run(timeout: float | None) -> None:
            for tensor in _listed(tensors):
                array = self._guard("broadcast", _Flat, tensor)
                fields = ("root", root), *array.fields
                self._compare("broadcast", fields, timeout)
                if self._size > 1 and array.size:
                    way = self._transports.pick(_AUTO, False, False)
                    way.broadcast(array.bytes, root, _deadline(timeout))
                array.store()

        return self._submit("broadcast", run, _listed(tensors), opts)

    def allgather(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Copy each rank's tensor to all ranks; sizes may differ between ranks."""

        def run(timeout: float | None) -> None:
            for places, tensor in zip(outputs, inputs):
                self._gather_into("all_gather", places, tensor, timeout)

        return self._submit("all_gather", run, list(outputs), opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Like `allgather`, for several tensors: `outputs[rank][j]` of `inputs[j]`."""
        return self.allgather(list(zip(*outputs)), inputs, opts)

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        """Concatenate each rank's tensor, all of one size."""
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Like `all_gather_single`, for several tensors."""

        def run(timeout: float | None) -> None:
            for output, source in zip(outputs, inputs):
                self._gather_into("all_gather_into_tensor", output, source, timeout)

        return self._submit("all_gather_into_tensor", run, list(outputs), opts)

    def _gather_into(
        self, name: str, outputs: Any, source: Any, timeout: float | None
    ) -> None:
        def prepare() -> tuple[_Flat, list[_Flat], Any]:
            """Return the input, the outputs, and memory for all ranks."""
            mine = _Flat(source)
            if isinstance(outputs, torch.Tensor):
                whole = _Flat(outputs)
                whole.require(name, mine.tensor.dtype, mine.size * self._size)
                return mine, [whole], whole.bytes
            parts = [_Flat(output) for output in outputs]
            if len(parts) != self._size:
                raise ArgumentError(f"{name} needs {self._size} output tensors")
            parts[self._rank].require(name, mine.tensor.dtype, mine.size)
            return mine, parts, np.empty(sum(p.nbytes for p in parts), np.uint8)

        mine, places, received = self._guard(name, prepare)
        if len(places) == 1 and self._size > 1:
            fields, counts = mine.fields, [mine.nbytes] * self._size
        else:
            fields = ("dtype", mine.dtype), ("sizes", tuple(p.size for p in places))
            counts = [place.nbytes for place in places]
        self._compare(name, fields, timeout)
        self._gather(mine.bytes, received, counts, timeout)
        start = 0
        for place in places:
            if place.bytes is not received:
                place.bytes[...] = received[start : start + place.nbytes]
                start += place.nbytes
            place.store()

    def _gather(
        self, mine: Any, received: Any, counts: list[int], timeout: float | None
    ) -> None:
        if self._size == 1:
            received[...] = mine
        elif received.size:
            way = self._transports.pick(_AUTO, False, False)
            way.allgatherv(mine, received, counts, _deadline(timeout))

    def reduce_scatter(
        self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any = None
    ) -> Any:
        """Reduce tensor r of each rank's list to rank r."""
        return self._scatter_sums("reduce_scatter", outputs, inputs, opts)

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        """Reduce equal parts of a tensor: part r to rank r."""
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Like `reduce_scatter_single`, for several tensors."""
        return self._scatter_sums("reduce_scatter_tensor", outputs, inputs, opts)

    def _scatter_sums(
        self, name: str, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any
    ) -> Any:
        op = _Reduction.of(opts)

        def run(timeout: float | None) -> None:
            for output, source in zip(outputs, inputs):
                self._scatter_sum(name, op, output, source, timeout)

        return self._submit(name, run, list(outputs), opts)

    def _scatter_sum(
        self, name: str, op: _Reduction, output: Any, source: Any, timeout: float | None
    ) -> None:
        def prepare() -> tuple[_Flat, ReduceOp, Any, list[int]]:
            whole, own = _concatenated(source), _Flat(output)
            if isinstance(source, torch.Tensor):
                lengths = [own.size] * self._size
            else:
                lengths = [tensor.numel() for tensor in source]
            own.require(name, whole.tensor.dtype, lengths[self._rank])
            whole.require(name, own.tensor.dtype, sum(lengths))
            if op.name in _BITWISE:
                raise UnsupportedError(f"{name} has no {op.name}; use all_reduce")
            return own, *op.prepare(whole), lengths

        own, known, array, lengths = self._guard(name, prepare)
        options = CommunicationOptions(timeout_seconds=timeout)
        equal = None if len(set(lengths)) == 1 else lengths
        found = self._collectives.reduce_scatter(
            f"{name} of {op.name}", known, array, 0, equal, options
        )
        own.array[...] = op.of_sum(found, own, self._size)
        own.store()

    def alltoall(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Send `inputs[r]` to rank r; `outputs[r]` comes from rank r."""

        def run(timeout: float | None) -> None:
            def prepare() -> tuple[_Flat, list[_Flat], list[int]]:
                return (
                    _concatenated(inputs),
                    [_Flat(output) for output in outputs],
                    [tensor.numel() for tensor in inputs],
                )

            mine, places, to = self._guard("all_to_all", prepare)
            self._exchange("all_to_all", mine, to, places, timeout)

        return self._submit("all_to_all", run, list(outputs), opts)

    def all_to_all_single(
        self,
        output: Any,
        source: Any,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:
        """Send rows to each rank, and receive rows from each.

        Equal numbers of rows, or those that `input_sizes` and `output_sizes` say.
        """

        def run(timeout: float | None) -> None:
            def prepare() -> tuple[_Flat, list[_Flat], list[int]]:
                mine = _Flat(source)
                to = _split("input_split_sizes", source, input_sizes, self._size)
                sizes = _split("output_split_sizes", output, output_sizes, self._size)
                whole = _Flat(output)
                return mine, whole.parts(sizes), to

            mine, places, to = self._guard("all_to_all_single", prepare)
            self._exchange("all_to_all_single", mine, to, places, timeout)

        return self._submit("all_to_all_single", run, [output], opts)

    def gather(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Copy each rank's tensor to rank `opts.rootRank`."""
        root = _root_of(opts)

        def run(timeout: float | None) -> None:
            def prepare() -> tuple[_Flat, list[_Flat]]:
                mine = _Flat(inputs[0])
                if self._rank != root:
                    return mine, []
                return mine, _places("gather", mine, outputs, self._size)

            mine, places = self._guard("gather", prepare)
            self._compare("gather", (("root", root), *mine.fields), timeout)
            to = [mine.size * (rank == root) for rank in range(self._size)]
            self._move("gather", mine, to, places, timeout)

        return self._submit("gather", run, list(outputs), opts)

    def scatter(
        self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any = None
    ) -> Any:
        """Copy tensor r of rank `opts.rootRank`'s list to rank r."""
        root = _root_of(opts)

        def run(timeout: float | None) -> None:
            def prepare() -> tuple[_Flat, list[_Flat], list[int]]:
                own = _Flat(outputs[0])
                empty = [_Flat(outputs[0].detach().reshape(-1)[:0])] * self._size
                places = [*empty]
                places[root] = own
                if self._rank != root:
                    return empty[0], places, [0] * self._size
                parts = _places("scatter", own, inputs, self._size)
                mine = _concatenated([part.tensor for part in parts])
                return mine, places, [own.size] * self._size

            mine, places, to = self._guard("scatter", prepare)
            fields = ("root", root), *places[root].fields
            self._compare("scatter", fields, timeout)
            self._move("scatter", mine, to, places, timeout)

        return self._submit("scatter", run, list(outputs), opts)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks."""
        return self._submit(
            "barrier", lambda timeout: self._compare("barrier", (), timeout), [], opts
        )

    def monitored_barrier(self, opts: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; after the timeout raise an error that names the missing.

        `wait_all_ranks` makes no difference: all missing ranks are named.
        """
        self._submit(
            "monitored_barrier",
            lambda timeout: self._compare("monitored_barrier", (), timeout),
            [],
            opts,
        ).wait()

    def send(self, tensors: Sequence[Any], rank: int, tag: int = 0) -> Any:
        """Send a tensor to one rank. Not collective."""
        (tensor,) = _listed(tensors)
        array = _Flat(tensor)

        def end(status: MPI.Status) -> None:
            del status

        request = self._messages.Isend([array.bytes, MPI.BYTE], rank, tag)
        return self._message("send", array, [tensor], request, end)

    def recv(self, tensors: Sequence[Any], rank: int, tag: int = 0) -> Any:
        """Receive a tensor from one rank. Not collective."""
        (tensor,) = _listed(tensors)
        array = _Flat(tensor)
        request = self._messages.Irecv([array.bytes, MPI.BYTE], rank, tag)

        def end(status: MPI.Status) -> None:
            message.source = status.Get_source()
            received = status.Get_count(MPI.BYTE)
            array.store()
            if received != array.nbytes:
                raise MismatchError(
                    f"recv: rank {message.source} has sent {received} bytes to rank "
                    f"{self._rank}, whose tensor has {array.nbytes}"
                )

        message = self._message("recv", array, [tensor], request, end)
        return message

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> Any:
        """Receive a tensor from any rank. Not collective."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # The names in other versions of PyTorch
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _message(
        self, name: str, array: _Flat, outputs: list[Any], request: Any, end: Any
    ) -> _Message:
        del array  # `end` or the request keep its memory
        departures = self._consensus.departures
        return _Message(name, departures, self._messages, outputs, request, end)

    def _exchange(
        self,
        name: str,
        mine: _Flat,
        to: list[int],
        places: list[_Flat],
        timeout: float | None,
    ) -> None:
        """Agree on sizes that each rank states for itself; then move the data."""
        sizes = [place.size for place in places]
        self._compare(name, (("dtype", mine.dtype),), timeout)
        everyone = self._consensus.gather(f"sizes of {name}", (to, sizes))
        for (sender, (sent, _)), (receiver, (_, expected)) in itertools.product(
            enumerate(everyone), repeat=2
        ):
            if sent[receiver] != expected[sender]:
                with self._consensus.same_on_all():
                    raise MismatchError(
                        f"{name}: rank {sender} sends {sent[receiver]} elements to "
                        f"rank {receiver}, which expects {expected[sender]}"
                    )
        largest = max(max(sum(sent), sum(got)) for sent, got in everyone)
        self._move(name, mine, to, places, timeout, largest)

    def _move(
        self,
        name: str,
        mine: _Flat,
        to: list[int],
        places: list[_Flat],
        timeout: float | None,
        largest: int | None = None,
    ) -> None:
        """Send and receive elements; `places` may be fewer than ranks, for none."""
        width = mine.itemsize
        counts = [place.nbytes for place in places] or [0] * self._size
        received = np.empty(sum(counts), np.uint8)
        way = self._transports.exchange(is_device=False)
        assert way is not None
        largest = mine.size * self._size if largest is None else largest
        way.alltoallv(
            mine.bytes,
            [n * width for n in to],
            received,
            counts,
            _deadline(timeout),
            name,
            is_large=largest * width > way.most_bytes,
        )
        start = 0
        for place in places:
            place.bytes[...] = received[start : start + place.nbytes]
            start += place.nbytes
            place.store()

    def _guard(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Return `fn(*args)`; its error on one rank is raised on all."""
        return self._consensus.guard(name, fn, *args)

    def _compare(
        self, name: str, fields: tuple[tuple[str, Any], ...], timeout: float | None
    ) -> None:
        call = CallSignature(name, fields)
        self._consensus.compare(call, digest(call), timeout=timeout)

    def _submit(
        self, name: str, run: Callable[[float | None], None], outputs: Any, opts: Any
    ) -> _Work:
        timeout = c10d.seconds_of(opts, self._timeout)
        work, consensus = _Work(outputs), self._consensus
        self._calls += 1

        def in_turn() -> None:
            # The operations of a group belong to the thread that runs them now; the
            # end of the program, to the thread that made the group
            consensus.lock.adopt()
            try:
                with consensus.lock:
                    run(timeout)
            finally:
                consensus.lock.creator = self._creator

        self._executor.submit(work, in_turn, c10d.may_wait(opts))
        return work


class _Reduction(NamedTuple):
    """A reduction of c10d, and the factor of PREMUL_SUM."""

    name: str
    factor: Any = None

    @classmethod
    def of(cls, opts: Any) -> _Reduction:
        """Return the reduction of options, or of a `ReduceOp` itself."""
        op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
        name, factor = c10d.name_of(op), None
        if name == "PREMUL_SUM":
            factor = op.__getstate__()[1]
        return cls(name, factor)

    def prepare(self, source: _Flat) -> tuple[ReduceOp, Any]:
        """Return this library's reduction, and the array to reduce."""
        name, array = self.name, source.array
        if name == "PREMUL_SUM":
            return ReduceOp.SUM, array * np.asarray(self.factor, array.dtype)
        if source.tensor.dtype is torch.bool:
            name = _OF_BOOLEANS.get(name, name)
        if name not in _REDUCE_OPS:
            raise DTypeError(f"{source.dtype} cannot be reduced by {self.name}")
        if name == "AVG" and source.tensor.dtype is torch.bool:
            raise DTypeError("booleans (bool) have no AVG; use SUM")
        if name == "AVG" and array.dtype.kind in "iu":
            return ReduceOp.SUM, array
        return _REDUCE_OPS[name], array

    def of_sum(self, found: Any, like: _Flat, ranks: int) -> Any:
        """Return what was reduced; of integers' AVG, their sum, the quotient.

        Rounded towards zero, as NCCL does.
        """
        if self.name != "AVG" or like.array.dtype.kind not in "iu":
            return found
        quotient, rest = np.divmod(found, ranks)
        return quotient + ((rest != 0) & (found < 0))

    def reserve(self, source: _Flat, ranks: int) -> Any:
        """Return memory for the arrays of all ranks, for a bitwise reduction."""
        if source.array.dtype.kind not in "iu":
            raise DTypeError(f"{source.dtype} cannot be reduced by {self.name}")
        return np.empty((ranks, source.size), source.array.dtype)


class _Flat:
    """The elements of a tensor as a contiguous array, which shares its memory.

    Where the tensor is not contiguous, or has lazy bits, the array is a copy, and
    `store` writes it back.
    """

    def __init__(self, tensor: Any):
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentTypeError(f"a tensor is needed, not {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise UnsupportedError(f"a {tensor.layout} tensor; pass a dense one")
        if tensor.device.type != "cpu":
            raise UnsupportedError(
                f"a tensor on {tensor.device}: this backend moves tensors on the CPU; "
                f"use init_process_group('cpu:{BACKEND},cuda:nccl')"
            )
        self._original = tensor
        data = tensor.detach()
        self.is_copy = not data.is_contiguous() or data.is_conj() or data.is_neg()
        if self.is_copy:
            data = torch.empty(data.shape, dtype=data.dtype).copy_(data)
        # As `reshape(-1)`, which keeps strides of 0 where there is one element
        self.tensor = data.as_strided((data.numel(),), (1,), data.storage_offset())
        self.size, self.itemsize = data.numel(), data.element_size()
        self.nbytes = self.size * self.itemsize

    @functools.cached_property
    def bytes(self) -> Any:
        """The memory."""
        if not self.size:
            return np.empty(0, np.uint8)
        # Not `numpy()`, after which PyTorch does not resize the storage, as FSDP does
        memory = (ctypes.c_uint8 * self.nbytes).from_address(self.tensor.data_ptr())
        memory.owner = self.tensor  # arrays keep it alive
        return np.frombuffer(memory, np.uint8)

    @functools.cached_property
    def array(self) -> Any:
        """The elements, in NumPy's or ml_dtypes's dtype; booleans as bytes."""
        dtype = self.tensor.dtype
        return self.bytes if dtype is torch.bool else self.bytes.view(_numpy_of(dtype))

    @property
    def adds_in_place(self) -> bool:
        """Whether sums may be formed in the tensor's memory."""
        return self.tensor.dtype in _IN_PLACE_DTYPES

    @property
    def dtype(self) -> str:
        """The name of the dtype."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def fields(self) -> tuple[tuple[str, Any], ...]:
        """What must be equal on all ranks."""
        return ("dtype", self.dtype), ("elements", self.size)

    def copy(self) -> _Flat:
        """Return the elements in memory of their own."""
        return _Flat(self.tensor.clone())

    def parts(self, sizes: Sequence[int]) -> list[_Flat]:
        """Return the elements in parts."""
        if self.is_copy:
            raise UnsupportedError("the output of all_to_all_single is not contiguous")
        return [_Flat(part) for part in self.tensor.split(list(sizes))]

    def require(self, name: str, dtype: Any, size: int) -> None:
        """Raise an ArgumentError unless dtype and size are these."""
        if self.tensor.dtype is not dtype or self.size != size:
            raise ArgumentError(
                f"{name}: a tensor of {self.size} elements of {self.tensor.dtype} "
                f"stands where {size} of {dtype} are needed"
            )

    def store(self) -> None:
        """Write the elements to the tensor, if they are a copy."""
        if self.is_copy:
            shaped = self.tensor.view(self._original.shape)
            self._original.data.copy_(shaped)  # without another version


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _root_of(opts: Any) -> int:
    """Return the root of options, or a root itself."""
    root: int = 0 if opts is None else getattr(opts, "rootRank", opts)
    return root


def _concatenated(tensors: Any) -> _Flat:
    if isinstance(tensors, torch.Tensor):
        return _Flat(tensors)
    flats = [_Flat(tensor).tensor for tensor in tensors]
    return _Flat(torch.cat(flats) if len(flats) > 1 else flats[0].clone())


def _places(name: str, like: _Flat, lists: Any, ranks: int) -> list[_Flat]:
    """Return the root's tensors, one for each rank, all of one size."""
    places = [_Flat(tensor) for tensor in (lists[0] if lists else ())]
    if len(places) != ranks:
        raise ArgumentError(f"{name} needs {ranks} tensors on its root")
    for place in places:
        place.require(name, like.tensor.dtype, like.size)
    return places


def _split(
    name: str, tensor: Any, sizes: Sequence[int] | None, ranks: int
) -> list[int]:
    """Return how many elements of a tensor each rank sends or gets."""
    rows = tensor.shape[0] if tensor.dim() else 0
    per_row = tensor.numel() // rows if rows else 0
    if not sizes:
        if rows % ranks:
            raise ArgumentError(
                f"all_to_all_single: {rows} rows do not divide by {ranks} ranks; pass "
                f"{name}"
            )
        return [rows // ranks * per_row] * ranks
    if len(sizes) != ranks or sum(sizes) != rows:
        raise ArgumentError(f"{name} must be {ranks} numbers with the sum {rows}")
    return [size * per_row for size in sizes]


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


@functools.lru_cache
def _numpy_of(dtype: Any) -> Any:
    """Return NumPy's dtype, or that of ml_dtypes, for a dtype of PyTorch."""
    if dtype is torch.bfloat16:
        return np.dtype(ml_dtypes.bfloat16)
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        name = str(dtype).removeprefix("torch.")
        raise DTypeError(f"{name} cannot be reduced; it can only be moved") from None


@functools.cache
def _finish_at_exit() -> None:
    """Let what was issued end before the ranks agree on the end of the program."""
    atexit.register(c10d.finish_all)  # runs before that, which was registered first


_numbers = itertools.count()
_communicators: dict[int, MPI.Intracomm] = {}
_groups: weakref.WeakKeyDictionary[Strategy, Any] = weakref.WeakKeyDictionary()
# Options of one backend are no options of another one
_next_world: contextvars.ContextVar[MPI.Intracomm | None] = contextvars.ContextVar(
    "_next_world", default=None
)


def _create(options: Any, pg_options: Any) -> Any:
    """Return the backend of a new process group. Collective over its ranks."""
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        asked = pg_options or ProcessGroupOptions(_next_world.get())
        comm = asked.communicator or MPI.COMM_WORLD
        found = comm.Get_rank(), comm.Get_size()
        if (options.group_rank, options.group_size) != found:
            raise ArgumentError(
                f"{_CALL} was called as rank {options.group_rank} of "
                f"{options.group_size}, but MPI's is rank {found[0]} of {found[1]}"
            )
        _communicators[0] = comm
        return c10d.publish(Operations(comm, options.timeout), options, BACKEND)
    world = _communicators[0]
    tag = sum(options.group_id.encode()) % 32749  # of MPI's at least 32767
    comm = world.Create_group(world.group.Incl(ranks), tag)
    operations = Operations(comm, options.timeout)
    comm.Free()  # they have duplicates
    return c10d.publish(operations, options, BACKEND)


def group_of(strategy: Strategy) -> Any:
    """Return a process group of a strategy's ranks. Collective when it is made.

    That is the default group of torch.distributed, which is made if there is none,
    where it has these ranks in this order.
    """
    group = _groups.get(strategy)
    if group is not None and group in dist.distributed_c10d._world.pg_map:
        return group
    comm = strategy.extended.topology.comm
    if not dist.is_initialized():
        _init_by(comm, strategy.extended.device)
    ranks = comm.allgather(dist.get_rank())
    group = dist.group.WORLD
    if ranks != list(range(dist.get_world_size())):
        group = dist.new_group(ranks, use_local_synchronization=True)
    _groups[strategy] = group
    return group


def _init_by(comm: MPI.Intracomm, device: str) -> None:
    """Make the default process group of a communicator's ranks. Collective."""
    is_cpu = device.startswith("CPU") or not torch.cuda.is_available()
    backend = BACKEND if is_cpu else f"cpu:{BACKEND},cuda:nccl"
    store, rank, size = next(_rendezvous_by_mpi(c10d.DEFAULT_TIMEOUT, comm))
    token = _next_world.set(comm)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    finally:
        _next_world.reset(token)


def _rendezvous_by_mpi(
    timeout: datetime.timedelta, comm: MPI.Intracomm = MPI.COMM_WORLD
) -> Iterator[tuple[Any, int, int]]:
    """Yield a store, this rank and the number of ranks, by MPI. Collective."""
    rank, size = comm.Get_rank(), comm.Get_size()
    is_one_node = len(set(comm.allgather(MPI.Get_processor_name()))) == 1
    store, place = None, ("", 0)
    if rank == 0:
        host = "127.0.0.1" if is_one_node else MPI.Get_processor_name()
        store = dist.TCPStore(
            host, 0, size, True, timeout=timeout, wait_for_workers=False
        )
        place = host, store.port
    host, port = comm.bcast(place)
    if store is None:
        store = dist.TCPStore(
            host, port, size, False, timeout=timeout, wait_for_workers=False
        )
    yield store, rank, size


def register() -> None:
    """Make the backend known to PyTorch; called by `import mpidist.torch`."""
    c10d.register(BACKEND, _create, _rendezvous_by_mpi)
    skip_folder(os.path.dirname(torch.__file__) + os.sep)
