"""Gradients that a thread sends to other nodes while the backward pass makes others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from mpidist.comm.bucket_layout import BucketStep, bucket_bytes_of, divide
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import CallSignature, digest
from mpidist.comm.gradient_buckets import can_be_threaded, take_side
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.torch.pieces import weigh, write

__all__ = ["Overlap"]

_CALL = "DistributedDataParallel"


class Overlap:
    """Adds up gradients of one pass in buckets, in a thread. Collective to make.

    Args:
      group: the ranks, on several nodes.
      parameters: of the model.
      dtypes: in which the gradient of each is added up.
      options: see `CommunicationOptions`.
      bucket_bytes: the largest bucket; None for some of them.
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
        self._sends = [
            torch.empty(p.shape, dtype=dtype) for p, dtype in zip(parameters, dtypes)
        ]
        self._arrays = [send.numpy() for send in self._sends]
        sizes = [a.nbytes for a in self._arrays]
        bucket_bytes = bucket_bytes or bucket_bytes_of(sizes)
        # The last layers have their gradients first
        self._divided = divide(sizes, range(len(sizes) - 1, -1, -1), bucket_bytes)
        calls = [
            CallSignature(f"bucket {j} of {_CALL}", (("leaves", tuple(leaves)),))
            for j, leaves in enumerate(self._divided)
        ]
        self._calls = [(call, digest(call)) for call in calls]
        self._side = take_side(group, self)
        self._is_threaded = can_be_threaded(group, self._side)
        self._step: BucketStep | None = None
        self._abandoned: BucketStep | None = None
        self._weight = 1.0
        self._results: list[Any] = []

    def begin(self, weight: float) -> None:
        """Begin a pass, on which the ranks have agreed.

        Args:
          weight: of this rank's gradients; with 0 they add nothing.
        """
        if self._abandoned is not None:
            self._abandoned.finish()  # on all ranks it has ended, or is about to
            self._abandoned = None
        self._weight = weight
        self._step = BucketStep(self._divided, self._reduce, self._is_threaded)

    @property
    def has_begun(self) -> bool:
        """Whether a pass goes on."""
        return self._step is not None

    def put(self, number: int, gradient: Any) -> None:
        """Take a gradient, or None; its bucket may be ready with it."""
        assert self._step is not None
        if self._step.has(number):
            return
        weigh(self._sends[number], gradient, self._weight)
        self._step.put(number, self._arrays[number])

    def put_rest(self) -> None:
        """Take the gradients that the pass has not made."""
        assert self._step is not None
        for number in sorted(self._step.missing()):
            self.put(number, self._parameters[number].grad)

    def abandon(self, error: Exception) -> None:
        """Leave a pass that an exception has ended on this rank. Not collective.

        The threads of the others learn of it by their buckets.
        """
        if self._step is not None:
            self._step.fail(error)
            self._abandoned, self._step = self._step, None

    def finish(self, error: Exception | None = None) -> Exception | None:
        """Wait for the thread; return why it has failed, if so. Collective.

        Args:
          error: what all ranks are about to raise, in place of the sums.
        """
        step, self._step = self._step, None
        if step is None:
            return None
        with Pending(_CALL, self._group.consensus.comm):
            begun = time.monotonic_ns()
            try:
                step.finish(error)
                if self._is_threaded:
                    self._group.consensus.recorder.counters.end_exposed(begun)
            except BaseException as interruption:  # the thread has not ended yet
                self._group.consensus.leave(interruption)
                raise
        self._results = [] if step.error else list(step.results())
        return step.error

    def give_back(self, used: int) -> None:
        """Write the sums into `.grad`.

        Args:
          used: a bit for each parameter of which some rank has a gradient; -1 for all.
        """
        results, self._results = self._results, []
        for j, p in enumerate(self._parameters):
            if used >> j & 1:
                write(p, torch.from_numpy(results[j]))

    def _reduce(
        self,
        bucket: int,
        values: Sequence[Any],
        _: Sequence[Any],
        error: Exception | None,
    ) -> list[Any]:
        """Return the sums of a bucket, or raise on all ranks. Collective."""
        own = self._side.consensus
        if bucket == 0 and self._is_threaded:  # these are a thread's own
            own.lock.adopt()
        call, number = self._calls[bucket]
        if error is not None:
            own.sync_errors(call.operation, error)
        collectives = self._side.channel.collectives
        return collectives.reduce_large(
            call, number, ReduceOp.SUM, values, self._options
        )
