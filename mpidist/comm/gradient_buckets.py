"""Reduction of gradients during the backward pass."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.arithmetic import result_bytes
from mpidist.comm.collectives.arguments import check_each, to_arrays
from mpidist.comm.collectives.plans import StepResults
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.flight_recorder import Recorder
from mpidist.comm.consensus.pending import Pending
from mpidist.comm.consensus.public_calls import announce_errors
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.comm.replica_group import CommunicatorResources, ReplicaGroup
from mpidist.device import arrays
from mpidist.device.streams import WorkerStream, record
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    CollectiveError,
    ContextError,
)
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.util import nest, validation
from mpidist.util.available_memory import LINE_BYTES
from mpidist.util.dtypes import accumulator_dtype
from mpidist.util.logs import warn
from mpidist.util.representation import one_line

Reduce = Callable[[int, Sequence[Any], Sequence[Any], Exception | None], Sequence[Any]]


# Enough buckets that the network starts early and has little work left at the end. The
# number does not depend on times, since the last bits of results may depend on the
# buckets
_BUCKETS = 16
_LEAST_BYTES, _MOST_BYTES = 1 << 20, 8 << 20


def bucket_bytes_of(sizes: Sequence[int]) -> int:
    """Return the size of a bucket, given the sizes of all arrays in bytes."""
    return min(max(sum(sizes) // _BUCKETS, _LEAST_BYTES), _MOST_BYTES)


def divide(
    sizes: Sequence[int], order: Sequence[int], bucket_bytes: int
) -> list[list[int]]:
    """Return the arrays of each bucket, by their numbers.

    The first and the last bucket have a quarter of the size of others, so that
    reductions begin early and little is left after the last array.

    Args:
      sizes: of all arrays, in bytes.
      order: all numbers, in the order of reduction.
      bucket_bytes: the size of a bucket; larger arrays get their own bucket.
    """
    if not order:
        return []
    small_bytes = bucket_bytes // 4
    last = _count_fitting([sizes[j] for j in reversed(order)], small_bytes)
    edge = len(order) - last
    buckets: list[list[int]] = []
    room = -1
    for j in order[:edge]:
        if sizes[j] > room:
            room = bucket_bytes if buckets else small_bytes
            buckets.append([])
        buckets[-1].append(j)
        room -= sizes[j]
    return [*buckets, list(order[edge:])]


def _count_fitting(sizes: Sequence[int], limit: int) -> int:
    fitting = [total for total in itertools.accumulate(sizes) if total <= limit]
    return max(len(fitting), min(len(sizes), 1))


def leaves_by_key(
    spec: nest.Spec, count: int
) -> dict[Any, tuple[list[int], nest.Spec]]:
    """Return the numbers of the leaves below each key of a nest, and their structure.

    Raises:
      ArgumentTypeError: the nest is not a mapping, list or tuple.
    """
    numbers = nest.unflatten(spec, range(count))
    if isinstance(numbers, Mapping):
        return {key: nest.flatten(part) for key, part in numbers.items()}
    if isinstance(numbers, list | tuple):
        return {j: nest.flatten(part) for j, part in enumerate(numbers)}
    what = "one array" if isinstance(numbers, int) else type(numbers).__name__
    raise ArgumentTypeError(
        f"gradient_buckets needs a mapping, a list or a tuple of gradients, not {what}"
    )


class BucketStep:
    """One step: the gradients so far, and the thread that reduces them.

    Args:
      buckets: the leaves of each, in the order in which they are reduced.
      reduce: given the number of a bucket, its arrays and when they are made, returns
        their reductions; given an error, raises it on all ranks. Collective.
      is_threaded: whether there is a thread; else `finish` does its work.
    """

    def __init__(
        self, buckets: Sequence[Sequence[int]], reduce: Reduce, is_threaded: bool
    ):
        self._buckets = buckets
        self._reduce = reduce
        self._given: dict[int, Any] = {}
        self._made: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._is_ready = [threading.Event() for _ in buckets]
        self._is_over = [threading.Event() for _ in buckets]
        self._reduced = 0  # number of buckets
        self._bucket_of = {
            leaf: j for j, leaves in enumerate(buckets) for leaf in leaves
        }
        self._lacking = [len(leaves) for leaves in buckets]
        self.order: list[int] = []  # in which the leaves were put
        self.error: Exception | None = None
        self._failure: Exception | None = None
        self._is_cancelled = False
        self._thread: threading.Thread | None = None
        if is_threaded:
            self._thread = threading.Thread(
                target=self._work, name="mpidist-reduce", daemon=True
            )
            self._thread.start()

    def has(self, leaf: int) -> bool:
        """Return whether a leaf was put."""
        return leaf in self._given

    def missing(self) -> set[int]:
        """Return the leaves that were not put."""
        return set(self._bucket_of) - set(self._given)

    def put(self, leaf: int, array: Any, made: Any = None) -> None:
        """Take a leaf; its bucket may be ready with it.

        Args:
          leaf: its number.
          array: its values.
          made: the event that the GPU has computed them.
        """
        self._given[leaf] = array
        if made is not None:
            self._made[leaf] = made
        self.order.append(leaf)
        bucket = self._bucket_of[leaf]
        self._lacking[bucket] -= 1
        if not self._lacking[bucket]:
            self._is_ready[bucket].set()

    @property
    def is_reduced(self) -> bool:
        """Whether all buckets are reduced: no rank waits for this one's data."""
        return self._reduced == len(self._buckets)

    def cancel(self, error: BaseException) -> None:
        """Let the thread end if no rank has put a leaf."""
        self._is_cancelled = True
        self.fail(error)

    def finish(self, error: BaseException | None = None) -> None:
        """Wait until all buckets are reduced, or raise `error`.

        Args:
          error: raised in place of the first bucket that lacks arrays, on all ranks.
        """
        if error is not None:
            self.fail(error)
        if self._thread is not None:
            self._thread.join()
        elif not all(event.is_set() for event in self._is_over):
            self._work()

    def wait_for(self, bucket: int) -> bool:
        """Wait for a bucket; return whether it was reduced."""
        if self._thread is None:
            self.finish()
        self._is_over[bucket].wait()
        return bucket < self._reduced

    def results(self) -> Iterator[Any]:
        """Yield the reductions of all leaves in their order."""
        return (self._results[leaf] for leaf in range(len(self._results)))

    def fail(self, error: BaseException) -> None:
        """Let the first bucket that lacks arrays raise an error, on all ranks."""
        if not isinstance(error, Exception):  # only this rank raises it as it is
            error = CollectiveError(f"a rank has left its step by {error!r}")
        self._failure = error
        for is_ready in self._is_ready:
            is_ready.set()

    def _work(self) -> None:
        try:
            for bucket, leaves in enumerate(self._buckets):
                self._is_ready[bucket].wait()
                if self._is_cancelled:
                    return
                lacks = self._lacking[bucket] > 0
                values = [] if lacks else [self._given[leaf] for leaf in leaves]
                failure = self._failure if lacks else None
                made = [self._made[leaf] for leaf in leaves if leaf in self._made]
                reduced = self._reduce(bucket, values, made, failure)
                self._results.update(zip(leaves, reduced, strict=True))
                self._reduced += 1
                self._is_over[bucket].set()
        except Exception as caught:
            self.error = caught
        finally:
            for event in self._is_over:
                event.set()


_CALL = "GradientBuckets"
# Collect garbage when this many sides exist, then at twice as many: rarely, since a
# collection takes milliseconds.
_COLLECT_AT = 16


class _Background:
    """A communicator and its channel for a thread. Collective to create.

    Args:
      group: the ranks; not stored, since this object outlives it.
    """

    def __init__(self, group: ReplicaGroup):
        failures = group.consensus.failures
        self.results = StepResults()
        with Pending("making a communicator", group.topology.comm):
            # A separate communicator: messages of the thread's collectives never match
            # those of the main thread.
            comm = failures.add(group.topology.comm.Dup())
        self.consensus = Consensus(comm, failures=failures)
        # This thread runs during the backward pass, and should not use its core by
        # spinning.
        self.consensus.departures.yields_cpu = True
        self.consensus.departures.least_pause = group.consensus.departures.least_pause
        try:
            self.channel = CommunicatorResources(
                _CALL,
                self.consensus,
                group.topology,
                group.symmetric_memory,
                group.gpus,
                is_background=True,
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
            self.consensus.failures.free(self.consensus.comm)


class _Sides:
    """The sides of one strategy: one for each set of buckets in use.

    Buckets dropped without `close` are collected at different times on each rank, so
    creating new ones first finds the sides that no rank uses.
    """

    def __init__(self, closing: list[Callable[[], None]]):
        self._sides: list[_Background] = []
        self._closing = closing
        closing.append(self.close)
        self._collect_at = _COLLECT_AT

    def __len__(self) -> int:
        return len(self._sides)

    def recorders(self) -> list[Recorder]:
        return [side.consensus.recorder for side in self._sides]

    def take(self, group: ReplicaGroup, owner: Any) -> _Background:
        """Return a side for its new owner. Collective."""
        # Buckets in a cycle of references are dropped only by the collector.
        if len(self._sides) >= self._collect_at:
            gc.collect()
            self._collect_at *= 2
        # Each rank's garbage collector frees objects at its own time, so only sides
        # that are unused on ALL ranks may be reused. The gather makes that known.
        dropped = {j for j, side in enumerate(self._sides) if side.is_dropped()}
        everywhere = set.intersection(
            *group.consensus.gather_objects(_CALL, lambda: dropped)
        )
        if everywhere:
            # min(): any rule that gives the same side on all ranks.
            side = self._sides[min(everywhere)]
        else:
            side = _Background(group)
            self._sides.append(side)
        # Weak, or the buckets would never be seen as dropped.
        side.owner = weakref.ref(owner)
        return side

    def close(self) -> None:
        """Free all. Collective."""
        self._closing.remove(self.close)
        while self._sides:
            self._sides.pop().close()


def acquire_background(group: ReplicaGroup, owner: Any) -> _Background:
    """Return a communicator for a thread, and its channel. Collective.

    Args:
      group: the ranks.
      owner: the user of it; when it is freed on all ranks, it can be reused.
    """
    if group.sides is None:
        group.sides = _Sides(group.closing)
    side: _Background = group.sides.take(group, owner)
    return side


def can_be_threaded(group: ReplicaGroup, side: _Background) -> bool:
    """Return whether several threads can communicate. Collective.

    Warns if not.
    """
    if side.consensus.size == 1:
        return False
    # The lowest level of any rank counts: all must make the same decision.
    levels = group.consensus.gather_objects(_CALL, MPI.Query_thread)
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

    `Strategy.gradient_buckets` creates it, once; a `with` block is one step.

    Gradients are grouped in buckets. When all gradients of a bucket are put, a thread
    reduces it. The order of the buckets is the same on all replicas: in the first step
    the reverse of the order in the nest, then the order in which replica 0 put the
    gradients in the first step. The thread needs a core of its own.

    Entering and leaving the block is collective. An error inside the block on one
    replica is raised on all when they leave it. Do not change a gradient before the end
    of the block.
    """

    result: Any = None
    """After the block: the nest of reduced gradients of this step."""

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
            leaves, self._spec, inputs = to_arrays(like)
            # An empty copy keeps library and device, but not the memory of `like`
            self._originals = [
                arrays.like_foreign(a.reshape(-1)[:0].copy(), leaf)
                for a, leaf in zip(inputs, leaves)
            ]
            check_each(
                inputs, self._spec, lambda a, name: accumulator_dtype(a.dtype, name)
            )
            self._kinds = [(a.dtype, tuple(a.shape)) for a in inputs]
            self._sizes = [a.nbytes for a in inputs]
            asked = self._options.bytes_per_pack
            self._bucket_bytes = asked or bucket_bytes_of(self._sizes)
            # All results of a step share one allocation, each on its own cache lines.
            self._result_bytes = sum(
                LINE_BYTES + size
                for a in inputs
                for size in result_bytes(
                    self._op, a.dtype, a.size, self._options.compression
                )
            )
            self._leaves_of = leaves_by_key(self._spec, len(inputs))

        def describe(_: None) -> CallSignature:
            agreed = (("reduce_op", self._op.name), *vars(self._options).items())
            return CallSignature(_CALL, agreed, self._spec, tuple(self._kinds))

        self._consensus.run(_CALL, prepare, same=describe)
        self._has_order = False
        self._step: BucketStep | None = None
        self._beginning: BucketStep | None = None
        self._is_closed = False
        self._used = acquire_background(group, self)
        self._own, self._results = self._used.consensus, self._used.results
        # Backward passes usually give the last layer's gradients first.
        self._plan(range(len(self._kinds) - 1, -1, -1))
        self._is_threaded = can_be_threaded(group, self._used)
        self._side: WorkerStream | None = None
        if self._is_threaded and group.gpus is not None:
            self._side = self._consensus.run(_CALL, WorkerStream)

    def __repr__(self) -> str:
        def describe() -> str:
            size = f"{sum(self._sizes):,} bytes in {len(self._sizes):,} arrays"
            closed = ", closed" if self._is_closed else ""
            return f"{self._op.name} of {size}{closed}"

        return one_line(self, describe)

    def _plan(self, order: Sequence[int]) -> None:
        self._buckets = divide(self._sizes, order, self._bucket_bytes)
        self._calls = [
            self._own.call(
                CallSignature(
                    f"bucket {j} of GradientBuckets", (("leaves", tuple(leaves)),)
                ),
                self._options.timeout_seconds,
            )
            for j, leaves in enumerate(self._buckets)
        ]

    def __enter__(self) -> GradientBuckets:
        """Begin a step. Collective.

        Raises, on all replicas:
          ContextError: a step has begun already, or the buckets are closed.
        """
        self._beginning = None
        # Closing is collective, so this is the same on all ranks and may raise at once.
        if self._is_closed or self._group.topology.closed:  # on all replicas
            raise ContextError("these GradientBuckets are closed")
        with self._consensus.call(f"{_CALL}.__enter__") as call:
            self._beginning = step = call.reserve(self._begin)
            call.agree()
        self.result = None
        self._consensus.enter_scope()
        self._step = step
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
        _, nested, inputs = to_arrays(value)
        if nested != spec:
            raise ArgumentError(f"gradient {key!r} must be like {spec}, not {nested}")
        for number, array in zip(numbers, inputs, strict=True):
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

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        """End a step: wait for the reductions, which are then in `result`. Collective.

        Raises, on all replicas:
          ArgumentError: a replica has not put all gradients.
          What the block raised on any replica.
          DeadlineError: see `CommunicationOptions`.
        """
        step = self._step
        assert step is not None
        # Gradients that are missing here would block the threads of all ranks.
        missing = step.missing()
        if error is None and missing:
            keys = [k for k, (ns, _) in self._leaves_of.items() if missing & set(ns)]
            error = ArgumentError(f"gradients were not put in this step: {keys}")
        if error is not None:
            # Before the ranks wait for each other: one that is interrupted waits for
            # the threads alone
            step.fail(error)
        # All ranks learn here whether any rank failed in its block.
        timeout = self._options.timeout_seconds
        self._consensus.leave_scope(f"{_CALL}.__exit__", error, timeout)
        with Pending(f"{_CALL}.__exit__", self._consensus.comm):
            begun = time.monotonic_ns()
            step.finish()
            if self._is_threaded:
                self._consensus.recorder.counters.end_exposed(begun)
        self._results.end()
        if self._side is not None:
            self._side.end()
        self._consensus.require_same(f"{_CALL}.__exit__", step.error)
        results = map(arrays.like_foreign, step.results(), self._originals)
        self.result = nest.unflatten(self._spec, results)
        if not self._has_order:
            order = step.order
            self._plan(self._consensus.root_only(_CALL, lambda: order))
            self._has_order = True
        self._step = self._beginning = None

    def _leave_step(self, name: str, error: BaseException) -> None:
        """Let the threads of all ranks end a step that has failed on this one."""
        consensus = self._consensus
        is_known = consensus.is_known(error, consensus.lock.state.event - 1)
        step = self._step if name == "__exit__" else self._beginning
        if step is None:
            return
        if name == "__exit__":
            # The threads of other replicas wait for gradients that this one has not put
            step.fail(error)
        else:  # no rank has put a gradient, if all know of the error
            step.cancel(error)
        if not (is_known or step.is_reduced):
            self._own.mark_broken(error)
        elif name == "__exit__":
            step.finish()
        self._results.end()
        self._step = self._beginning = None

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
        call = self._calls[bucket]
        if error is not None:
            call.fail(error)
        collectives = self._used.channel.collectives
        options = self._options
        with nullcontext() if self._side is None else self._side.work(made):
            return collectives.reduce_large(call, self._op, values, options)

    def close(self) -> None:
        """Release the communicator; a second call does nothing. Collective.

        The end of the strategy does the same. The communicator of buckets that were
        dropped without `close` is reused later.
        """
        if not self._is_closed:
            self._is_closed = True
            self._used.owner = None


announce_errors(
    GradientBuckets,
    ("__enter__", "__exit__"),
    lambda buckets: buckets._consensus,
    after=GradientBuckets._leave_step,
)
