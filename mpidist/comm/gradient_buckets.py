"""Reduction of gradients during the backward pass."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.arithmetic import result_bytes
from mpidist.comm.bucket_layout import (
    BucketStep,
    bucket_bytes_of,
    divide,
    leaves_by_key,
)
from mpidist.comm.collectives.arguments import check_each, to_arrays
from mpidist.comm.collectives.outputs import StepResults
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.flight_recorder import Recorder
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.signatures import CallSignature, digest
from mpidist.comm.replica_group import Channel, ReplicaGroup
from mpidist.device import arrays
from mpidist.device.streams import WorkerStream, record
from mpidist.errors import ArgumentError, ContextError
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.util import nest, validation
from mpidist.util.notices import warn
from mpidist.util.representation import one_line

__all__ = ["GradientBuckets", "can_be_threaded", "take_side"]

_CALL = "GradientBuckets"
# Collect garbage when this many sides exist, then at twice as many: rarely, since a
# collection takes milliseconds.
_COLLECT_AT = 16
_LINE_BYTES = 64  # each result begins with one


class _Side:
    """A communicator and its channel for a thread. Collective to create.

    Args:
      group: the ranks; not stored, since this object outlives it.
    """

    def __init__(self, group: ReplicaGroup):
        failures = group.topology.failures
        self._failures = failures
        self.results = StepResults()
        with Pending("making a communicator", group.topology.comm):
            # A separate communicator: messages of the thread's collectives never match
            # those of the main thread.
            comm = failures.add(group.topology.comm.Dup())
        self.consensus = Consensus(comm, failures=failures)
        # This thread runs during the backward pass, and should not use its core by
        # spinning.
        self.consensus.departures.yields_cpu = True
        try:
            self.channel = Channel(
                _CALL,
                self.consensus,
                group.topology,
                group.symmetric_memory,
                group.gpus,
                is_beside=True,
                results=self.results,
            )
        except Exception:  # it is raised on all ranks
            self.consensus.close()
            failures.free(comm)
            raise
        # The buckets that use it; None if they were closed
        self.owner: weakref.ref[Any] | None = None

    def is_dropped(self) -> bool:
        """Return whether it is unused on this rank and can be reused."""
        # A broken one cannot be used again: ranks may be at different calls.
        is_used = self.owner is not None and self.owner() is not None
        return not is_used and self.consensus.broken is None

    def close(self) -> None:
        """Free it. Collective."""
        self.consensus.close()
        self.channel.close()
        # Messages in flight would be received by the next communicator with this
        # context id. See `Consensus.drain`.
        if self.consensus.drain():
            self._failures.free(self.consensus.comm)


class _Sides:
    """The sides of one strategy: one for each set of buckets in use.

    Buckets dropped without `close` are collected at different times on each rank, so
    creating new ones first finds the sides that no rank uses.

    Args:
      closing: functions to call when the strategy is closed.
    """

    def __init__(self, closing: list[Callable[[], None]]):
        self._sides: list[_Side] = []
        self._closing = closing
        closing.append(self.close)
        self._collect_at = _COLLECT_AT

    def __len__(self) -> int:
        return len(self._sides)

    def recorders(self) -> list[Recorder]:
        """Return the communicators of all sides."""
        return [side.consensus.recorder for side in self._sides]

    def take(self, group: ReplicaGroup, owner: Any) -> _Side:
        """Return a side for its new owner. Collective."""
        # Buckets in a cycle of references are dropped only by the collector.
        if len(self._sides) >= self._collect_at:
            gc.collect()
            self._collect_at *= 2
        # Each rank's garbage collector frees objects at its own time, so only sides
        # that are unused on ALL ranks may be reused. The gather makes that known.
        dropped = {j for j, side in enumerate(self._sides) if side.is_dropped()}
        everywhere = set.intersection(*group.consensus.gather(_CALL, dropped))
        if everywhere:
            # min(): any rule that gives the same side on all ranks.
            side = self._sides[min(everywhere)]
        else:
            side = _Side(group)
            self._sides.append(side)
        # Weak, or the buckets would never be seen as dropped.
        side.owner = weakref.ref(owner)
        return side

    def close(self) -> None:
        """Free all. Collective."""
        self._closing.remove(self.close)
        while self._sides:
            self._sides.pop().close()


def take_side(group: ReplicaGroup, owner: Any) -> _Side:
    """Return a communicator for a thread, and its channel. Collective.

    Args:
      group: the ranks.
      owner: the user of it; when it is freed on all ranks, it can be reused.
    """
    if group.sides is None:
        group.sides = _Sides(group.closing)
    found: _Side = group.sides.take(group, owner)
    return found


def can_be_threaded(group: ReplicaGroup, side: _Side) -> bool:
    """Return whether several threads can communicate. Collective.

    Warns if not.
    """
    if side.consensus.size == 1:
        return False
    # The lowest level of any rank counts: all must make the same decision.
    levels = group.consensus.gather(_CALL, MPI.Query_thread())
    is_threaded = min(levels) == MPI.THREAD_MULTIPLE
    if not is_threaded and side.consensus.rank == 0:
        warn(
            "gradients are reduced at the end of each step, not during the backward "
            "pass: MPI was initialised without MPI_THREAD_MULTIPLE; remove the "
            "program's setting of mpi4py.rc.thread_level",
            stacklevel=3,
        )
    return is_threaded


class GradientBuckets:
    """Reduce gradients over all replicas during the backward pass.

    `strategy.gradient_buckets` creates it, once; a `with` block is one step:

      >>> weights = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
      >>> buckets = strategy.gradient_buckets(weights, "MEAN")
      >>> def backward():
      ...     with buckets:
      ...         buckets.put("w", np.ones((3, 2)))  # as soon as it is computed
      ...         buckets.put("b", np.full(2, 0.5))
      ...     return buckets.result["b"]
      >>> strategy.run(backward).values
      (array([0.5, 0.5]),)
      >>> buckets.close()

    Gradients are grouped in buckets. When all gradients of a bucket are put, a thread
    reduces it. The order of the buckets is the same on all replicas: in the first step
    the reverse of the order in the nest, then the order in which replica 0 put the
    gradients in the first step. The thread needs a core of its own.

    Entering and leaving the block is collective. An error inside the block on one
    replica is raised on all when they leave it. Do not change a gradient before the end
    of the block.
    """

    result: Any = None

    def __init__(
        self,
        group: ReplicaGroup,
        like: Any,
        reduce_op: ReduceOp | str,
        options: CommunicationOptions | None = None,
    ):
        group.topology.require_open()
        self._group = group
        self._consensus = group.consensus
        self._options = CommunicationOptions() if options is None else options

        def prepare() -> None:
            validation.instance("options", self._options, CommunicationOptions)
            self._op = ReduceOp.parse(reduce_op)
            if not self._op.adds:
                raise ArgumentError(
                    "the reduce_op of gradient buckets must be 'SUM' or 'MEAN', not "
                    f"{self._op.name!r}"
                )
            leaves, self._spec, given = to_arrays(like)
            # An empty copy keeps library and device, but not the memory of `like`
            self._originals = [
                arrays.like_foreign(a.reshape(-1)[:0].copy(), leaf)
                for a, leaf in zip(given, leaves)
            ]
            check_each(
                given, self._spec, lambda a, name: arrays.summable(a.dtype, name)
            )
            self._kinds = [(a.dtype, tuple(a.shape)) for a in given]
            self._sizes = [a.nbytes for a in given]
            asked = self._options.bytes_per_pack
            self._bucket_bytes = asked or bucket_bytes_of(self._sizes)
            # All results of a step share one allocation, each on its own cache lines.
            self._result_bytes = sum(
                _LINE_BYTES + size
                for a in given
                for size in result_bytes(
                    self._op, a.dtype, a.size, self._options.compression
                )
            )
            self._leaves_of = leaves_by_key(self._spec, len(given))

        self._consensus.guard(_CALL, prepare)
        agreed = (("reduce_op", self._op.name), *vars(self._options).items())
        self._consensus.require_same(
            CallSignature(_CALL, agreed, self._spec, tuple(self._kinds))
        )
        # Backward passes usually give the last layer's gradients first.
        self._plan(range(len(self._kinds) - 1, -1, -1))
        self._has_order = False
        self._step: BucketStep | None = None
        self._is_closed = False
        self._used = take_side(group, self)
        self._own, self._results = self._used.consensus, self._used.results
        self._is_threaded = can_be_threaded(group, self._used)
        self._side: WorkerStream | None = None
        if self._is_threaded and group.gpus is not None:
            self._side = self._consensus.guard(_CALL, WorkerStream)

    def __repr__(self) -> str:
        def describe() -> str:
            size = f"{sum(self._sizes):,} bytes in {len(self._sizes):,} arrays"
            closed = ", closed" if self._is_closed else ""
            return f"{self._op.name} of {size}{closed}"

        return one_line(self, describe)

    def _plan(self, order: Sequence[int]) -> None:
        self._buckets = divide(self._sizes, order, self._bucket_bytes)
        calls = [
            CallSignature(
                f"bucket {j} of GradientBuckets", (("leaves", tuple(leaves)),)
            )
            for j, leaves in enumerate(self._buckets)
        ]
        self._calls = [(call, digest(call)) for call in calls]

    def __enter__(self) -> GradientBuckets:
        """Begin a step. Collective.

        Raises, on all replicas:
          ContextError: a step has begun already, or the buckets are closed.
        """
        # Closing is collective, so this is the same on all ranks and may raise at once.
        if self._is_closed or self._group.topology.closed:  # on all replicas
            raise ContextError("these GradientBuckets are closed")
        operation = f"{_CALL}.__enter__"
        step = self._consensus.guard(operation, self._begin)
        try:
            self._consensus.require_same(CallSignature(operation))
        except BaseException as error:
            # Another rank may have failed to begin: the thread of this step must not
            # wait for gradients.
            step.cancel(error)
            if self._consensus.broken is not None:
                # The threads of other ranks may wait for this one's already
                self._own.leave(error)
            raise
        self.result = None
        self._step = step
        self._consensus.enter_scope()
        return self

    def _begin(self) -> BucketStep:
        if self._step is not None:
            raise ContextError("GradientBuckets: a step has begun already")
        self._results.begin(self._result_bytes, self._group.zeros((0,), np.uint8))
        if self._side is not None:
            self._side.begin()
        return BucketStep(self._buckets, self._reduce, self._is_threaded)

    def put(self, key: Any, value: Any) -> None:
        """Hand over the gradients of one key of the nest. Not collective.

        Args:
          key: the key of the mapping, or the position in the list or tuple.
          value: an array, or a nest of them, with the structure, shapes and dtypes of
            the key's entry in `like`.

        Raises, here and, on all replicas, at the end of the block:
          ArgumentError: an unknown key; the key was put before; a different structure,
            shape or dtype.
          ContextError: outside a `with` block.
        """
        if self._step is None:
            raise ContextError(
                "GradientBuckets.put must be called inside `with buckets:`"
            )
        try:
            numbers, spec = self._leaves_of[key]
        except (KeyError, TypeError):  # or it is not hashable
            # Names are checked here, on the caller's thread, so that the traceback
            # shows the line.
            raise ArgumentError(
                f"no gradient has the key {validation.shown(key)}; the keys are "
                f"{list(self._leaves_of)}"
            ) from None
        _, found, given = to_arrays(value)
        if found != spec:
            raise ArgumentError(f"gradient {key!r} must be like {spec}, not {found}")
        for number, array in zip(numbers, given, strict=True):
            kind = array.dtype, tuple(array.shape)
            if kind != self._kinds[number]:
                dtype, shape = self._kinds[number]
                raise ArgumentError(
                    f"gradient {key!r} must be {dtype} of shape {shape}, not "
                    f"{array.dtype} of shape {array.shape}"
                )
            if self._step.has(number):
                raise ArgumentError(f"gradient {key!r} was put twice in this step")
            # The thread has a stream of its own
            made = record() if arrays.is_device_array(array) else None
            self._step.put(number, array, made)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End a step: wait for the reductions, which are then in `result`. Collective.

        Raises, on all replicas:
          ArgumentError: a replica has not put all gradients.
          What the block raised on any replica.
          DeadlineError: see `CommunicationOptions`.
        """
        # First forget the step: whatever happens below, the next block can begin.
        step, self._step = self._step, None
        assert step is not None
        # Gradients that are missing here would block the threads of all ranks.
        missing = step.missing()
        if error is None and missing:
            keys = [k for k, (ns, _) in self._leaves_of.items() if missing & set(ns)]
            error = ArgumentError(f"gradients were not put in this step: {keys}")
        try:
            # All ranks learn here whether any rank failed in its block.
            timeout = self._options.timeout_seconds
            self._consensus.leave_scope(f"{_CALL}.__exit__", error, timeout)
        except BaseException as raised:
            # The threads of other replicas wait for gradients that this one has not put
            step.finish(raised)
            self._results.end()
            raise
        with Pending(f"{_CALL}.__exit__", self._consensus.comm):
            begun = time.monotonic_ns()
            try:
                step.finish()
                if self._is_threaded:
                    self._consensus.recorder.counters.end_exposed(begun)
            except BaseException as interruption:  # the thread has not ended yet
                self._consensus.leave(interruption)
                raise
        self._results.end()
        if self._side is not None:
            self._side.end()
        self._consensus.sync_errors(f"{_CALL}.__exit__", step.error)
        results = map(arrays.like_foreign, step.results(), self._originals)
        self.result = nest.unflatten(self._spec, results)
        if not self._has_order:
            order = step.order
            self._plan(self._consensus.root_only(_CALL, lambda: order))
            self._has_order = True

    def _reduce(
        self,
        bucket: int,
        values: Sequence[Any],
        made: Sequence[Any],
        error: Exception | None,
    ) -> list[Any]:
        """Return the reductions of a bucket, or raise on all replicas. Collective."""
        if bucket == 0 and self._is_threaded:  # these are a thread's own
            self._group.use_device()
            self._own.lock.adopt()
        call, number = self._calls[bucket]
        if error is not None:
            self._own.sync_errors(call.operation, error)
        reductions = self._used.channel.collectives.reductions
        options = self._options
        with nullcontext() if self._side is None else self._side.work(made):
            return reductions.reduce_large(call, number, self._op, values, options)

    def close(self) -> None:
        """Release the communicator; a second call does nothing. Collective.

        The end of the strategy does the same. The communicator of buckets that were
        dropped without `close` is reused later.
        """
        if not self._is_closed:
            self._is_closed = True
            self._used.owner = None
