"""Reduce gradients in a thread, while the backward pass computes others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpidist.comm.bucket_layout import BucketStep, bucket_bytes_of, divide
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import CallSignature, digest
from mpidist.comm.gradient_buckets import can_be_threaded, take_side
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.device.streams import WorkerStream, record
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.torch import devices
from mpidist.torch.parameters import CALL
from mpidist.torch.pieces import weigh, write

__all__ = ["Overlap"]


class _Bucket:
    """Gradients that are reduced together, concatenated in memory.

    Args:
      numbers: the numbers of their parameters, in the order of the bucket.
      parameters: the model's parameters.
      dtypes: the dtype in which each parameter's gradient is summed.
    """

    def __init__(
        self, numbers: Sequence[int], parameters: Sequence[Any], dtypes: Sequence[Any]
    ):
        self.numbers = numbers
        self._shapes = [parameters[j].shape for j in numbers]
        kinds = [dtypes[j] for j in numbers]
        # One flat tensor per dtype, and the members of the bucket that are in it
        self._kinds = list(dict.fromkeys(kinds))
        self._members = [
            [k for k, kind in enumerate(kinds) if kind is wanted]
            for wanted in self._kinds
        ]
        device = parameters[numbers[0]].device
        self.flats = [
            torch.empty(
                sum(self._shapes[k].numel() for k in members), dtype=kind, device=device
            )
            for kind, members in zip(self._kinds, self._members)
        ]
        self.sends = self.divide(self.flats)

    def divide(self, flats: Sequence[Any]) -> list[Any]:
        """Return each gradient's view of `flats`, or of tensors like them."""
        parts: list[Any] = [None] * len(self.numbers)
        for flat, members in zip(flats, self._members):
            shapes = [self._shapes[k] for k in members]
            pieces = flat.split([shape.numel() for shape in shapes])
            for k, piece, shape in zip(members, pieces, shapes):
                parts[k] = piece.view(shape)
        return parts


class Overlap:
    """Sums the gradients of a pass in buckets, in a thread. Collective to create.

    Args:
      group: the ranks, on several nodes or on GPUs.
      parameters: the model's parameters.
      dtypes: the dtype in which each gradient is summed.
      options: see `CommunicationOptions`.
      bucket_bytes: the largest bucket; None to derive it from the model's size.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        parameters: Sequence[Any],
        dtypes: Sequence[Any],
        options: CommunicationOptions,
        bucket_bytes: int | None,
    ):
        self._group, self._options = group, options
        self._parameters = parameters
        sizes = [p.numel() * d.itemsize for p, d in zip(parameters, dtypes)]
        bucket_bytes = bucket_bytes or bucket_bytes_of(sizes)
        # In reverse order: gradients of the last layers are computed first
        self._divided = divide(sizes, range(len(sizes) - 1, -1, -1), bucket_bytes)
        self._buckets = group.consensus.guard(
            CALL, lambda: [_Bucket(ns, parameters, dtypes) for ns in self._divided]
        )
        self._sends = {
            number: send
            for bucket in self._buckets
            for number, send in zip(bucket.numbers, bucket.sends)
        }
        calls = [
            CallSignature(f"bucket {j} of {CALL}", (("leaves", tuple(leaves)),))
            for j, leaves in enumerate(self._divided)
        ]
        self._calls = [(call, digest(call)) for call in calls]
        self._side = take_side(group, self)
        self._is_threaded = can_be_threaded(group, self._side)
        self._is_on_gpu = devices.is_on_gpu(parameters[0])
        self._stream: WorkerStream | None = None
        if self._is_on_gpu:
            self._stream = group.consensus.guard(CALL, WorkerStream)
        self._step: BucketStep | None = None
        self._abandoned: BucketStep | None = None
        self._weight = 1.0
        self._totals: list[Sequence[Any]] = []

    def begin(self, weight: float) -> None:
        """Start a pass, after the ranks have agreed on it.

        Args:
          weight: the weight of this rank's gradients; 0 if it contributes nothing.
        """
        if self._abandoned is not None:
            self._abandoned.finish()  # it has ended on all ranks, or is about to
            self._abandoned = None
        self._weight = weight
        self._totals = []
        if self._stream is not None:
            with devices.on_stream_of(self._parameters[0]):
                self._stream.begin()
        self._step = BucketStep(self._divided, self._reduce, self._is_threaded)

    @property
    def has_begun(self) -> bool:
        """Whether a pass was started and has not ended."""
        return self._step is not None

    def put(self, number: int, gradient: Any) -> None:
        """Add a gradient, or None, to its bucket, which may be complete then."""
        assert self._step is not None
        if self._step.has(number):
            return
        send, made = self._sends[number], None
        weigh(send, gradient, self._weight)
        if self._is_on_gpu:  # the thread has a stream of its own
            with devices.on_stream_of(send):
                made = record()
        self._step.put(number, None, made)

    def put_rest(self) -> None:
        """Add the gradients that the pass has not computed."""
        assert self._step is not None
        for number in sorted(self._step.missing()):
            self.put(number, self._parameters[number].grad)

    def abandon(self, error: Exception) -> None:
        """Abandon a pass that an exception ended on this rank. Not collective.

        The other ranks' threads get the error with their next bucket.
        """
        if self._step is not None:
            self._step.fail(error)
            self._abandoned, self._step = self._step, None

    def finish(self, error: Exception) -> None:
        """Wait for the thread, and discard the sums. Collective.

        Args:
          error: the error that all ranks are about to raise.
        """
        self._end(lambda step: step.finish(error))

    def give_back(self, used: int) -> Exception | None:
        """Write sums to `.grad` as soon as each bucket is complete. Collective.

        Args:
          used: a bit for each parameter with a gradient on any rank; -1 for all.

        Returns:
          The thread's error, if it failed: then only some `.grad` have sums.
        """

        def write_all(step: BucketStep) -> None:
            for number, bucket in enumerate(self._buckets):
                if not step.wait_for(number):
                    assert step.error is not None
                    break
                totals, self._totals[number] = self._totals[number], ()
                self._write(bucket, totals, used)
            step.finish()

        return self._end(write_all)

    def _end(self, work: Callable[[BucketStep], None]) -> Exception | None:
        """Call `work` to end a pass, if one was started; return its thread's error."""
        step, self._step = self._step, None
        if step is None:
            return None
        with Pending(CALL, self._group.consensus.comm):
            begun = time.monotonic_ns()
            try:
                work(step)
                if self._is_threaded:
                    self._group.consensus.recorder.counters.end_exposed(begun)
            except BaseException as interruption:  # the thread may still communicate
                self._group.consensus.leave(interruption)
                raise
        return step.error

    def _write(self, bucket: _Bucket, totals: Sequence[Any], used: int) -> None:
        if self._stream is not None:
            with devices.on_stream_of(self._parameters[0]):
                self._stream.end()
        parts = bucket.divide([devices.as_tensor(total) for total in totals])
        if used == -1:
            gradients = [self._parameters[number].grad for number in bucket.numbers]
            torch._foreach_copy_(gradients, parts)
            return
        for number, part in zip(bucket.numbers, parts):
            if used >> number & 1:
                write(self._parameters[number], part)

    def _reduce(
        self,
        bucket: int,
        values: Sequence[Any],
        made: Sequence[Any],
        error: Exception | None,
    ) -> Sequence[Any]:
        """Sum a bucket over all ranks, or raise on all of them. Collective."""
        own = self._side.consensus
        if bucket == 0 and self._is_threaded:  # device and lock are per thread
            self._group.use_device()
            own.lock.adopt()
        call, number = self._calls[bucket]
        if error is not None:
            own.sync_errors(call.operation, error)
        if self._stream is None:
            self._totals.append(self._sum(bucket, call, number))
        else:
            with self._stream.work(made):
                self._totals.append(self._sum(bucket, call, number))
        return values

    def _sum(self, bucket: int, call: CallSignature, number: int) -> Sequence[Any]:
        flats = self._buckets[bucket].flats
        given = self._side.consensus.guard(
            call.operation, lambda: [devices.as_array(flat) for flat in flats]
        )
        return self._side.channel.collectives.reduce_large(
            call, number, ReduceOp.SUM, given, self._options
        )
