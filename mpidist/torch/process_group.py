"""A backend of torch.distributed over MPI, for `init_process_group("mpidist")`.

All that PyTorch builds on process groups runs over it: DistributedDataParallel, FSDP,
distributed checkpoints, DTensor. Before data move, the ranks compare their calls, so a
difference is an error on all ranks instead of a hang or wrong numbers. Collectives run
in the order in which PyTorch issues them, in a thread, so that they overlap with the
backward pass.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI

from mpidist.comm.consensus.consensus import Call
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import CallSignature, skip_folder
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.errors import ArgumentError, ContextError, MismatchError
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.strategy.strategy import Strategy
from mpidist.torch import compat, devices
from mpidist.torch.flat_tensors import FlatTensor, Reduction, concatenate, output_of
from mpidist.torch.messages import Messages, free
from mpidist.torch.works import Executor, Work
from mpidist.util.buffers import Field

_BACKEND = "mpidist"
# Larger arrays are reduced where they lie; smaller ones travel with the comparison
_IN_PLACE_BYTES = 128 << 10
# Elements of a bucket that takes less time than another thread needs to begin
_FEW = _IN_PLACE_BYTES // 4
_KEPT = 256  # works of one element, and kinds of calls
_BITWISE = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
_ADDRESSES = (1 << 62) - 1
_T = TypeVar("_T")
_AUTO = CommunicationImplementation.AUTO
_options_of = functools.lru_cache(CommunicationOptions)


class Operations:
    """The operations of one process group over MPI. Collective to create.

    Tensors are on the CPU; those on a GPU are copied there and back. Operations are
    those of `torch.distributed`; each is collective but `send` and `recv`. Sums of
    float16 and bfloat16 are formed in float32. Ranks may differ in nothing that the
    operation needs to be equal.

    Args:
      comm: the ranks; duplicated.
      timeout: for each operation; PyTorch's default for none but
        MPIDIST_HANG_SECONDS.

    Raises, from each operation and on all ranks:
      DivergenceError: the ranks call different operations.
      MismatchError: dtypes, sizes, roots or reductions differ.
      DTypeError: a dtype cannot be reduced in this way.
      UnsupportedError: a sparse tensor, or one of another device.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: datetime.timedelta | None = None):
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ContextError(
                "a process group needs an MPI library started with MPI_THREAD_MULTIPLE"
            )
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._group = ReplicaGroup(["CPU:0"], communicator=comm)
        self._consensus = self._group.consensus
        self._collectives = self._group.collectives
        self._transports = self._collectives.transports
        in_node = self._transports.intra_node
        # The transport of a job on one node, which large gradients take
        self._in_node = in_node if in_node and in_node.name == "shared" else None
        self._buckets = SharedBuckets(self._group)
        self._executor = Executor(f"mpidist-process-group-{next(_numbers)}")
        self._timeout = timeout
        # The operation that runs, and its timeout; and all kinds that ran
        self._call = self._consensus.call("")
        self._seconds: float | None = None
        self._calls: dict[Any, Call] = {}
        self._messages = Messages(comm, self._consensus.departures)
        # Without this object, whose end lets the ranks free all of it together
        self._group.closing.append(
            functools.partial(_free, self._messages.comm, self._group.closing)
        )
        # `Join` leaves one to C++ alone, which would then wait for it for ever
        self._kept: collections.deque[Work] = collections.deque(maxlen=_KEPT)
        _finish_at_exit()

    # What c10d asks of a backend beside operations

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name that users pass to `init_process_group`."""
        return _BACKEND

    name = getBackendName

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

    def finish(self) -> None:
        """Wait for this rank's operations. Not collective."""
        self._executor.close()
        self._messages.stop()

    def shutdown(self) -> None:
        """Wait for this rank's operations, the last ones. Not collective."""
        self.finish()
        self._consensus.retire()
        compat.withdraw(self)

    abort = shutdown

    # Operations

    def allreduce(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """Reduce tensors over all ranks, in place."""
        op, outputs = Reduction.of(opts), _listed(tensors)
        is_bucket = op.name == "SUM" and len(outputs) == 1
        is_bucket &= self._in_node is not None and compat.is_of_reducer()

        def reduce(tensor: Any) -> None:
            flat = self._call.reserve(output_of, tensor)
            is_large = flat.nbytes > _IN_PLACE_BYTES and not flat.is_copy
            if is_bucket and is_large and op.adds_in_place(flat):
                outputs[0] = self._reduce_bucket(flat)
                return
            self._reduce(op, flat, flat)
            flat.store()

        return self._submit("all_reduce", outputs, opts, reduce, _listed(tensors))

    def _reduce_bucket(self, flat: FlatTensor) -> Any:
        """Return the sum of gradients, in memory of the node from the third time on.

        Its memory is written again when the same bucket is reduced the next time.
        """
        buckets, bucket = self._buckets, self._buckets.find(flat)
        if bucket is not None and bucket.sum is not None:
            # Before the ranks agree: after that, others may read it
            bucket.sum.copy_(flat.tensor)
        fields = ("reduce_op", "SUM of gradients"), *flat.fields
        address = buckets.address_of(bucket, flat)
        is_known = self._agree(*fields, address=address)
        # The first time it is remembered, the second time it gets memory that the node
        # shares, and from then on the ranks add there and PyTorch takes the sum there
        if not is_known or bucket is None:
            buckets.add(flat)
        elif bucket.sum is not None:
            assert self._in_node is not None
            self._transports.count(self._in_node.name, flat.nbytes)
            self._in_node.allreduce_in_place(bucket.everyone, self._deadline())
            return bucket.sum
        else:
            buckets.allocate(bucket, flat)
        self._pick().allreduce([flat.array], flat.array, self._deadline())
        return flat.tensor

    def reduce(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """Reduce a tensor over all ranks, in place on rank `opts.rootRank`."""
        op, root = Reduction.of(opts), _root_of(opts)

        def reduce(tensor: Any) -> None:
            flat = self._call.reserve(output_of, tensor)
            total = self._call.reserve(flat.copy)
            self._reduce(op, flat, total, ("root", root))
            if self._rank == root:
                flat.bytes[...] = total.bytes
                flat.store()

        outputs = _listed(tensors)
        return self._submit("reduce", outputs, opts, reduce, outputs)

    def _reduce(
        self,
        op: Reduction,
        source: FlatTensor,
        total: FlatTensor,
        *fields: tuple[str, Any],
    ) -> None:
        """Put the reduction of `source` into `total`, which may be the same."""
        agreed = ("reduce_op", op.name), *fields, *source.fields
        name = self._call.signature.operation
        if op.name in _BITWISE:
            self._call.reserve(op.require_integers, source)
            self._agree(*agreed)
            total.array[...] = source.array
            both = MPI.IN_PLACE, total.array
            request = self._messages.comm.Iallreduce(*both, _BITWISE[op.name])
            self._consensus.wait(request, self._deadline(), name)
            return
        known, array = self._call.reserve(op.prepare, source)
        # Large floats are added where they lie, without a copy for the comparison
        if source.nbytes > _IN_PLACE_BYTES and op.adds_in_place(source):
            self._agree(*agreed)
            if self._size > 1:
                self._pick().allreduce([array], total.array, self._deadline())
            else:
                total.array[...] = array
            if known.rule.divides:
                total.array /= self._size
            return
        named = f"{name} of {op.name}{''.join(f', {k} {v}' for k, v in fields)}"
        options = _options_of(timeout_seconds=self._seconds)
        sums = self._collectives.all_reduce(named, known, array, options)
        total.array[...] = op.finish(sums, self._size)

    def _pick(self) -> Any:
        return self._transports.pick(_AUTO, False, False)

    def broadcast(self, tensors: Sequence[Any], opts: Any = None) -> Any:
        """Copy tensors of rank `opts.rootRank` to all ranks."""
        root = _root_of(opts)

        def broadcast(tensor: Any) -> None:
            flat = self._call.reserve(output_of, tensor)
            self._agree(("root", root), *flat.fields)
            if self._size > 1 and flat.size:
                self._pick().broadcast(flat.bytes, root, self._deadline())
            flat.store()

        outputs = _listed(tensors)
        return self._submit("broadcast", outputs, opts, broadcast, outputs)

    def allgather(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Copy each rank's tensors to all ranks.

        An output is a list of tensors, whose sizes may differ, or one tensor for equal
        sizes.
        """
        is_list = not all(isinstance(output, torch.Tensor) for output in outputs)
        name = "all_gather" if is_list else "all_gather_into_tensor"
        return self._submit(name, outputs, opts, self._gather_into, outputs, inputs)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Like `allgather`, with `outputs[rank][j]` of `inputs[j]`."""
        return self.allgather(list(zip(*outputs)), inputs, opts)

    def all_gather_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        """Concatenate each rank's tensor, all of one size."""
        return self.allgather([output], [source], opts)

    def _gather_into(self, outputs: Any, source: Any) -> None:
        is_list = not isinstance(outputs, torch.Tensor)
        name = self._call.signature.operation

        def prepare() -> tuple[FlatTensor, list[FlatTensor], Any]:
            """Return the input, the outputs, and memory for all ranks."""
            sent = FlatTensor(source)
            if not is_list:
                whole = output_of(outputs)
                whole.require(name, sent, sent.size * self._size)
                return sent, [whole], whole.bytes
            parts = [output_of(output) for output in outputs]
            if len(parts) != self._size:
                raise ArgumentError(f"{name} needs {self._size} output tensors")
            parts[self._rank].require(name, sent, sent.size)
            return sent, parts, np.empty(sum(p.nbytes for p in parts), np.uint8)

        sent, targets, received = self._call.reserve(prepare)
        if is_list:
            sizes = tuple(target.size for target in targets)
            self._agree(("dtype", sent.dtype), ("sizes", sizes))
            self._gather(sent.bytes, received, [target.nbytes for target in targets])
            _spread(received, targets)
        else:
            self._agree(*sent.fields)
            self._gather(sent.bytes, received, [sent.nbytes] * self._size)
            targets[0].store()

    def _gather(self, sent: Any, received: Any, counts: list[int]) -> None:
        if self._size == 1:
            received[...] = sent
        elif received.size:
            self._pick().allgatherv(sent, received, counts, self._deadline())

    def reduce_scatter(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Reduce parts of inputs: part r to rank r.

        An input is a list of tensors, or one tensor with equal parts.
        """
        op, name = Reduction.of(opts), "reduce_scatter"

        def prepare(output: Any, source: Any) -> tuple[FlatTensor, Any, list[int]]:
            whole, part = concatenate(source), output_of(output)
            is_list = not isinstance(source, torch.Tensor)
            lengths = [part.size] * self._size
            if is_list:
                lengths = [tensor.numel() for tensor in source]
            part.require(name, whole, lengths[self._rank])
            whole.require(name, part, sum(lengths))
            return part, whole, lengths

        def scatter(output: Any, source: Any) -> None:
            part, whole, lengths = self._call.reserve(prepare, output, source)
            if op.name in _BITWISE:
                total = self._call.reserve(whole.copy)
                self._reduce(op, whole, total, ("sizes", tuple(lengths)))
                start = sum(lengths[: self._rank])
                part.array[...] = total.array[start : start + part.size]
                part.store()
                return
            known, array = self._call.reserve(op.prepare, whole)
            equal = None if len(set(lengths)) == 1 else lengths
            options = _options_of(timeout_seconds=self._seconds)
            sums = self._collectives.reduce_scatter(
                f"{name} of {op.name}", known, array, 0, equal, options
            )
            part.array[...] = op.finish(sums, self._size)
            part.store()

        return self._submit(name, outputs, opts, scatter, outputs, inputs)

    def reduce_scatter_single(self, output: Any, source: Any, opts: Any = None) -> Any:
        """Reduce equal parts of a tensor: part r to rank r."""
        return self.reduce_scatter([output], [source], opts)

    def alltoall(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Send `inputs[r]` to rank r; `outputs[r]` comes from rank r."""

        def prepare() -> tuple[FlatTensor, list[FlatTensor], list[int]]:
            if not len(inputs) == len(outputs) == self._size:
                raise ArgumentError(f"all_to_all needs {self._size} tensors in a list")
            targets = [output_of(output) for output in outputs]
            return concatenate(inputs), targets, [tensor.numel() for tensor in inputs]

        return self._submit(
            "all_to_all", outputs, opts, lambda: self._exchange(prepare)
        )

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
        wholes = []

        def prepare() -> tuple[FlatTensor, list[FlatTensor], list[int]]:
            sent, whole = FlatTensor(source), output_of(output)
            wholes.append(whole)
            to = _split("input_split_sizes", source, input_sizes, self._size)
            sizes = _split("output_split_sizes", output, output_sizes, self._size)
            return sent, whole.parts(sizes), to

        def exchange() -> None:
            self._exchange(prepare)
            wholes[0].store()

        return self._submit("all_to_all_single", [output], opts, exchange)

    def _exchange(self, prepare: Callable[[], Any]) -> None:
        """Agree on sizes that each rank states for itself; then move the data."""
        name = self._call.signature.operation
        sent, targets, to = self._call.reserve(prepare)
        # Sizes differ between ranks by right, so they cannot be part of the agreement:
        # each pair of sender and receiver is compared
        sizes = to, [target.size for target in targets]
        dtypes = {flat.dtype for flat in (sent, *targets)}
        self._agree(("dtype", " and ".join(sorted(dtypes))))
        every = self._consensus.gather_objects(f"sizes of {name}", lambda: sizes)
        table = np.array(every)
        sends, expects = table[:, 0], table[:, 1].T
        for sender, receiver in np.argwhere(sends != expects):
            with self._consensus.collective_errors():
                raise MismatchError(
                    f"{name}: rank {sender} sends {sends[sender, receiver]} elements "
                    f"to rank {receiver}, which expects {expects[sender, receiver]}"
                )
        self._move(sent, to, targets, int(table.sum(axis=2).max()))

    def gather(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> Any:
        """Copy each rank's tensor to rank `opts.rootRank`."""
        root = _root_of(opts)

        def prepare() -> tuple[FlatTensor, list[FlatTensor]]:
            sent = FlatTensor(inputs[0])
            is_root = self._rank == root
            return sent, self._all(outputs, sent, "gather") if is_root else []

        def gather() -> None:
            sent, targets = self._call.reserve(prepare)
            self._agree(("root", root), *sent.fields)
            to = [sent.size * (rank == root) for rank in range(self._size)]
            self._move(sent, to, targets, sent.size * self._size)

        return self._submit("gather", outputs, opts, gather)

    def scatter(
        self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any = None
    ) -> Any:
        """Copy tensor r of rank `opts.rootRank`'s list to rank r."""
        root = _root_of(opts)

        def prepare() -> tuple[FlatTensor, list[FlatTensor], list[int]]:
            target = output_of(outputs[0])
            nothing = FlatTensor(target.tensor[:0])
            targets = [target if r == root else nothing for r in range(self._size)]
            if self._rank != root:
                return nothing, targets, [0] * self._size
            parts = self._all(inputs, target, "scatter")
            sent = concatenate([part.tensor for part in parts])
            return sent, targets, [target.size] * self._size

        def scatter() -> None:
            sent, targets, to = self._call.reserve(prepare)
            target = targets[root]
            self._agree(("root", root), *target.fields)
            self._move(sent, to, targets, target.size * self._size)

        return self._submit("scatter", outputs, opts, scatter)

    def _all(self, lists: Any, like: FlatTensor, name: str) -> list[FlatTensor]:
        """Return the tensors of the root: one for each rank, all of one size."""
        targets = [FlatTensor(tensor) for tensor in (lists[0] if lists else ())]
        if len(targets) != self._size:
            raise ArgumentError(f"{name} needs {self._size} tensors on its root")
        for target in targets:
            target.require(name, like, like.size)
        return targets

    def _move(
        self, sent: FlatTensor, to: list[int], targets: list[FlatTensor], largest: int
    ) -> None:
        """Send and receive elements, of which no rank has more than `largest`.

        `targets` is empty on a rank that gets none.
        """
        counts = [target.nbytes for target in targets] or [0] * self._size
        received = np.empty(sum(counts), np.uint8)
        transport = self._transports.with_alltoallv(is_device=False)
        assert transport is not None
        is_large = largest * sent.itemsize > transport.most_bytes
        bytes_to = [n * sent.itemsize for n in to]
        name, deadline = self._call.signature.operation, self._deadline()
        transport.alltoallv(
            sent.bytes, bytes_to, received, counts, deadline, name, is_large
        )
        _spread(received, targets)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; an error at the timeout names the missing ones."""
        return self._submit("barrier", [], opts, self._agree)

    def monitored_barrier(
        self, timeout: Any = None, wait_all_ranks: bool = True
    ) -> None:
        """Like `barrier`, for `dist.monitored_barrier`. All missing ranks are named."""
        if timeout is not None:  # 0 is a limit here, and no default
            timeout = max(timeout, datetime.timedelta.resolution)
        self._submit("monitored_barrier", [], timeout, self._agree).wait()

    def send(self, tensors: Sequence[Any], rank: int, tag: int = 0) -> Any:
        """Send a tensor to one rank. Not collective."""
        flat = FlatTensor(*_listed(tensors))
        return self._messages.send(flat, rank, tag, self._default_seconds, tensors)

    def recv(self, tensors: Sequence[Any], rank: int, tag: int = 0) -> Any:
        """Receive a tensor from one rank. Not collective."""
        flat = output_of(*_listed(tensors))
        return self._messages.receive(flat, rank, tag, self._default_seconds, tensors)

    @property
    def _default_seconds(self) -> float | None:
        return compat.seconds_of(None, self._timeout)

    def recv_anysource(self, tensors: Sequence[Any], tag: int = 0) -> Any:
        """Receive a tensor from any rank. Not collective."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    # The names for several tensors, and in other versions of PyTorch
    allreduce_coalesced = allreduce
    all_gather_single_coalesced = allgather_into_tensor_coalesced = allgather
    _allgather_base = all_gather_single
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced = reduce_scatter
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def share(self, name: str, values: _T) -> list[_T]:
        """Return the values of all ranks, or only one if they are equal. Collective.

        Args:
          name: what needs them.
          values: a tuple of numbers, or of such tuples.
        """
        shared = [values]

        def run() -> None:
            # Of numbers, Python's hash is the same in all processes
            address = hash(values) & _ADDRESSES or 1
            if not self._agree(address=address):
                shared[:] = self._consensus.gather_objects(name, lambda: values)

        work = Work([])
        self._executor.submit(work, self._in_turn(name, None, run), may_wait=True)
        work.wait()
        return shared

    def _agree(self, *fields: tuple[str, Any], address: int = 0) -> bool:
        """Go on once all ranks are in this operation, with equal fields. Collective.

        Returns whether all passed the same `address`, other than 0.
        """
        key = self._call.signature.operation, fields, self._seconds
        call = self._calls.get(key)
        if call is None:
            if len(self._calls) >= _KEPT:
                self._calls.clear()
            signature = CallSignature(*key[:2])
            call = self._calls[key] = self._consensus.call(signature, self._seconds)
        return call.agree(address)

    def _deadline(self) -> float | None:
        return None if self._seconds is None else time.monotonic() + self._seconds

    def _submit(
        self,
        name: str,
        outputs: Any,
        opts: Any,
        run: Callable[..., object],
        *columns: Any,
    ) -> Work:
        """Call `run` in turn: for each row of the columns, or once without any."""
        rows = list(zip(*columns, strict=True)) if columns else [()]
        work = Work(outputs if isinstance(outputs, list) else list(outputs))

        def each() -> None:
            for row in rows:
                run(*row)

        first = columns[0][0] if columns and columns[0] else None
        is_short = isinstance(first, torch.Tensor) and self._is_short(first)
        if isinstance(first, torch.Tensor) and first.numel() == 1:
            self._kept.append(work)
        each = devices.after_stream((outputs, columns), each)
        in_turn = self._in_turn(name, opts, each)
        self._executor.submit(work, in_turn, compat.may_wait(opts, is_short))
        return work

    def _is_short(self, tensor: Any) -> bool:
        """Return whether to run in the calling thread: it is small or no core idle."""
        if tensor.numel() <= _FEW:
            return True
        node = self._in_node
        return node is not None and not node.has_idle_cores(torch.get_num_threads())

    def _in_turn(
        self, name: str, opts: Any, run: Callable[[], None]
    ) -> Callable[[], None]:
        seconds, lock = compat.seconds_of(opts, self._timeout), self._consensus.lock

        def in_turn() -> None:
            # The operations of a group belong to the thread that runs them now; the
            # end of the program, to the thread that made the group
            former = lock.adopt()
            try:
                with self._consensus.call(name) as self._call:
                    self._seconds = seconds
                    run()
            finally:
                lock.restore(former)

        return in_turn


def _free(comm: MPI.Intracomm, closing: list[Callable[[], None]]) -> None:
    """Free the communicator of messages, as the last function of `closing`."""
    closing.pop()
    free(comm)


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _root_of(opts: Any) -> int:
    root: int = 0 if opts is None else getattr(opts, "rootRank", opts)
    return root


def _spread(received: Any, targets: list[FlatTensor]) -> None:
    """Copy what was received to the tensors, one after another."""
    start = 0
    for target in targets:
        target.bytes[...] = received[start : start + target.nbytes]
        start += target.nbytes
        target.store()


def _split(
    name: str, tensor: Any, sizes: Sequence[int] | None, ranks: int
) -> list[int]:
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


@functools.cache
def _finish_at_exit() -> None:
    """Let what was issued end before the ranks agree on the end of the program."""
    atexit.register(compat.finish_all)  # runs before that, which was registered first


_numbers = itertools.count()
_world = MPI.COMM_WORLD  # of the default group
_next_worlds: list[MPI.Intracomm] = []  # of the group that is being made
_groups: weakref.WeakKeyDictionary[Strategy, Any] = weakref.WeakKeyDictionary()


def init_process_group(
    communicator: MPI.Intracomm | None = None,
    timeout: datetime.timedelta | None = None,
    backend: str = _BACKEND,
) -> None:
    """Start `torch.distributed` over the ranks of a communicator. Collective.

    Like `torch.distributed.init_process_group("mpidist")`, which takes COMM_WORLD.

    Args:
      communicator: the ranks; None for COMM_WORLD.
      timeout: of each operation. Without it, only the watchdog ends a wait, after
        MPIDIST_HANG_SECONDS.
      backend: such as "cpu:mpidist,cuda:nccl", where tensors are on GPUs, too.

    Example:
      >>> mpidist.torch.init_process_group()
      >>> total = torch.ones(2)
      >>> torch.distributed.all_reduce(total)
      >>> total
      tensor([2., 2.])
      >>> torch.distributed.destroy_process_group()
    """
    comm = communicator or MPI.COMM_WORLD
    store, rank, size = next(_rendezvous(timeout or compat.DEFAULT_TIMEOUT, comm))
    with _next_world(comm):
        dist.init_process_group(
            backend, timeout=timeout, store=store, rank=rank, world_size=size
        )


@contextlib.contextmanager
def _next_world(comm: MPI.Intracomm) -> Iterator[None]:
    _next_worlds.append(comm)
    try:
        yield
    finally:
        _next_worlds.pop()


def _create(options: Any, _: Any) -> Any:
    """Return the backend of a new process group. Collective over its ranks."""
    global _world
    ranks = list(options.global_ranks_in_group)
    comm = _next_worlds[-1] if _next_worlds else _world if ranks else MPI.COMM_WORLD
    is_part = bool(ranks) and not _next_worlds
    if not ranks:
        _world = comm
    if is_part:
        tag = sum(options.group_id.encode()) % 32749  # of MPI's at least 32767
        with Pending("new_group", comm, ranks):
            comm = comm.Create_group(comm.group.Incl(ranks), tag)
    with Pending("init_process_group", comm):
        asked = comm.allgather((options.group_rank, options.group_size))
    _require_ranks_of_mpi(comm, asked)
    operations = Operations(comm, options.timeout)
    if is_part:
        comm.Free()  # they have duplicates
    return compat.publish(operations, options, _BACKEND)


def group_of(strategy: Strategy) -> Any:
    """Return a process group of a strategy's ranks. Collective when it is made.

    That is the default group of torch.distributed, which is made if there is none,
    where it has these ranks in this order, and a backend that is as good.

    Raises MismatchError, on all ranks, if torch.distributed was started on some only.
    """
    group, consensus = _groups.get(strategy), strategy.extended.consensus
    name = "a process group of the strategy"
    has_one = compat.has_group(group)
    known = ("is_initialized()", dist.is_initialized()), ("has a group", has_one)
    consensus.require_same(CallSignature(name, known))
    if has_one:
        return group
    comm, device = strategy.extended.topology.comm, strategy.extended.device
    is_cpu = device.startswith("CPU") or not torch.cuda.is_available()
    backend = _BACKEND if is_cpu else compat.backends_of_gpus(_BACKEND)
    if not dist.is_initialized():
        init_process_group(comm, backend=backend)
    ranks = consensus.gather_objects(name, dist.get_rank)
    group, needed = dist.group.WORLD, f"cpu:{_BACKEND}" if is_cpu else "cuda:nccl"
    is_same = ranks == list(range(dist.get_world_size()))
    if not is_same or needed not in str(dist.get_backend_config(group)):
        with _next_world(comm):
            group = dist.new_group(
                ranks, backend=backend, use_local_synchronization=True
            )
    _groups[strategy] = group
    return group


def _rendezvous(
    timeout: datetime.timedelta,
    comm: MPI.Intracomm = MPI.COMM_WORLD,
    asked: tuple[int | None, int | None] = (None, None),
) -> Iterator[tuple[Any, int, int]]:
    """Yield a store, this rank and the number of ranks, by MPI. Collective.

    `asked` are the rank and the number of ranks that the user passed, if any.
    """
    rank, size = of_mpi = comm.Get_rank(), comm.Get_size()
    connect = functools.partial(
        dist.TCPStore, world_size=size, timeout=timeout, wait_for_workers=False
    )
    name = MPI.Get_processor_name()
    with Pending("init_process_group", comm):
        names, wishes = zip(*comm.allgather((name, asked)))
        _require_ranks_of_mpi(comm, wishes)
        is_local = len(set(names)) == 1
        # Rank 0 broadcasts host and port, or the error that all ranks raise
        store: Any = None
        address: Any = None
        if rank == 0:
            try:
                store = (
                    _listen(connect) if is_local else connect(name, 0, is_master=True)
                )
                address = "127.0.0.1" if is_local else name, store.port
            except Exception as error:
                address = error
        address = comm.bcast(address)
    if isinstance(address, Exception):
        raise address
    if store is None:
        store = connect(*address, is_master=False)
    yield store, *of_mpi


def _listen(connect: Callable[..., Any]) -> Any:
    """Return a store that other hosts do not reach."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        listen = functools.partial(connect, host, port, is_master=True, use_libuv=False)
        # PyTorch closes it. Not all versions of its other server take one
        return listen(master_listen_fd=listener.detach())


def _require_ranks_of_mpi(comm: MPI.Intracomm, asked: Sequence[Any]) -> None:
    """Raise an ArgumentError, on all ranks, unless `asked` of each rank is MPI's."""
    size_of_mpi = comm.Get_size()
    for number, (rank, size) in enumerate(asked):
        if rank not in (None, number) or size not in (None, size_of_mpi):
            raise ArgumentError(
                f"init_process_group was called with rank={rank} and world_size={size} "
                f"(or RANK and WORLD_SIZE are set), but MPI's are {number} and "
                f"{size_of_mpi}; leave both out, and start the program by mpirun or "
                "srun"
            )


def register() -> None:
    """Make the backend known to PyTorch; called by `import mpidist.torch`."""
    compat.register(_BACKEND, _create, _rendezvous)
    compat.refuse_builtin_hook(_BACKEND)
    skip_folder(os.path.dirname(torch.__file__) + os.sep)


# Of all buckets of a group, on each rank; further ones are reduced as all tensors
_MOST_BYTES = 1 << 30
_MOST_BUCKETS = 1000
# Those of models that are gone: not reduced in as many calls for each bucket
_UNUSED_CALLS = 100


@dataclasses.dataclass
class Bucket:
    """A bucket that was reduced before.

    Args:
      number: the same on all ranks.
      used: the number of the call that reduced it last.
      everyone: the arrays of all ranks, from the second time on.
      sum: this rank's array, as a tensor.
    """

    number: int
    used: int
    everyone: Any = None
    sum: Any = None

    @property
    def nbytes(self) -> int:
        """The memory of this rank."""
        return 0 if self.sum is None else int(self.sum.nbytes)


class SharedBuckets:
    """The gradients of DistributedDataParallel in memory that all ranks of a node see.

    PyTorch takes the sum of a bucket of gradients from the future of the reduction, so
    it may lie elsewhere than the bucket. Here it lies where each rank has added a part
    of it, in place, without copies through the small slots of other reductions: other
    ranks read those out of this one's cache, which takes long between cores that share
    none.

    All ranks reduce the same buckets in the same order, so they keep the same ones; a
    bucket is found by its address, though, which may be that of a former one on some
    ranks only. Then their numbers differ, and all ranks `add` it again.
    """

    def __init__(self, group: ReplicaGroup):
        self._group = group
        self._buckets: dict[Any, Bucket] = {}  # by address, elements and dtype
        self._calls = self._made = 0
        self._is_full = False  # a node had too little memory

    def find(self, flat: FlatTensor) -> Bucket | None:
        """Return the bucket that a tensor is, if it was added before."""
        self._calls += 1
        bucket = self._buckets.get(_key_of(flat))
        if bucket is not None:
            bucket.used = self._calls
        return bucket

    def address_of(self, bucket: Bucket | None, flat: FlatTensor) -> int:
        """Return what is the same on all ranks if all can use their buckets; or 0."""
        if bucket is None:
            return 0
        can_use = bucket.sum is not None or self._has_room(flat)
        return 2 * bucket.number + can_use + 1

    def _has_room(self, flat: FlatTensor) -> bool:
        used = sum(bucket.nbytes for bucket in self._buckets.values())
        return not self._is_full and used + flat.nbytes <= _MOST_BYTES

    def add(self, flat: FlatTensor) -> None:
        """Register a tensor for later calls. Collective."""
        if len(self._buckets) >= _MOST_BUCKETS:
            self._buckets.clear()
        self._made += 1
        self._buckets[_key_of(flat)] = Bucket(self._made, self._calls)

    def allocate(self, bucket: Bucket, flat: FlatTensor) -> None:
        """Give a bucket its memory, if there is enough. Collective."""
        oldest = self._calls - _UNUSED_CALLS * len(self._buckets)
        for key in [k for k, b in self._buckets.items() if b.used < oldest]:
            del self._buckets[key]
        memory = self._group.symmetric_memory
        if not self._has_room(flat):
            return
        try:
            (mine,) = memory.allocate(
                "all_reduce of gradients", [Field((flat.size,), flat.array.dtype)]
            )
        except ArgumentError:  # on all ranks
            self._is_full = True
            return
        bucket.everyone, bucket.sum = memory.everyone(mine), torch.from_numpy(mine)


def _key_of(flat: FlatTensor) -> tuple[int, int, Any]:
    return flat.tensor.data_ptr(), flat.size, flat.tensor.dtype
