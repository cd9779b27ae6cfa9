"""Iteration over a distributed dataset; every step is collective.

`next` returns once all replicas have their batches, or raises on all replicas.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from mpidist import context, values
from mpidist.comm.consensus.signatures import CallSignature, group_by_rank, name_ranks
from mpidist.comm.consensus.thread_order import STEP
from mpidist.data.distributed.reader import (
    LocalBatch,
    Prefetcher,
    ReadPlan,
    UnreadError,
    device_put,
    empty_on_device,
    start_reader,
)
from mpidist.data.distributed.shared_caches import reorder
from mpidist.data.elements import dtype_text, spec_of
from mpidist.data.iterator import (
    EpochCounter,
    Optional,
    make_state,
    read_state,
    seed_names,
)
from mpidist.data.map_dataset import Epoch
from mpidist.errors import ArgumentError, DataError, MismatchError, OutOfRangeError
from mpidist.util import nest
from mpidist.util.counters import NEXT
from mpidist.util.representation import one_line
from mpidist.util.tracebacks import hide_internal_frames

T = TypeVar("T")
_NEXT = "next of a distributed dataset"
_SET_STATE = "set_state of a distributed dataset"


class DistributedIterator:
    """An iterator over a distributed dataset. `next` is collective.

    A thread (or several, see `Dataset.map`) prefetches batches. It ends with the
    iteration, or when the iterator is closed or deleted.

    Example:
      >>> rows = mpidist.Dataset.range(4).batch(4)
      >>> iterator = iter(strategy.experimental_distribute_dataset(rows))
      >>> next(iterator)  # on replica 0
      PerReplica:{
        0: array([0, 1])
      }
    """

    def __init__(self, plan: ReadPlan, epochs: EpochCounter):
        self._plan = plan
        self._epochs = epochs
        depth = plan.options.experimental_per_replica_buffer_size
        # Keep all threads busy while a batch is in use
        self._depth = max(depth, plan.threads) if depth else 0
        # A global batch exists on all ranks or on none, so one consensus covers a group
        # of steps, unless a copy to a GPU may fail.
        self._agrees_per_step = not plan.is_global or plan.may_put_fail
        self._start(epochs.next_epoch())
        plan.extended.inputs.add(self)

    def __repr__(self) -> str:
        def describe() -> str:
            end = self._plan.cardinality
            of = f" of {end:,}" if end >= 0 else ""
            closed = ", closed" if self._is_closed else ""
            return f"step {self._step:,}{of}, epoch {self._epoch.number}{closed}"

        return one_line(self, describe)

    def _start(self, epoch: Epoch, step: int = 0) -> None:
        """Start before `step`, without prefetched batches.

        An iterable dataset starts before its first step; the caller skips to `step`.
        """
        self._epoch = epoch
        self._step = step
        self._progress_key = f"{STEP} {epoch.number} of {self._plan.name}"
        self._agreed_until = 0  # all replicas have their batches before this step
        self._per_step_until = 0  # before this step, replicas agree on each step
        self._prefetcher = Prefetcher(
            start_reader(self._plan, epoch),
            self._depth,
            self._plan.threads,
            self._plan.cardinality,
            step,
        )
        self._template: Any = None  # arrays without rows, known after the first batch
        self._is_closed = False
        self._failure: str | None = None

    @property
    def element_spec(self) -> Any:
        """A nest of `TensorSpec` like this replica's batches; None is the rows.

        Not collective: it may read an element of this replica.
        """
        if self._template is not None:
            return spec_of(self._template, self._plan.is_batched)
        return self._plan.pipeline.element_spec()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """Return this step's batch of all replicas, a nest of `PerReplica`. Collective.

        Raises, on all replicas:
          StopIteration: after the last step.
          DataError: a replica's rows cannot be read; or a generator failed before and
            cannot continue.
          MismatchError: generators yield different batches, or some have ended.
          ArgumentError: called inside a function that `Strategy.run` runs.
          What a mapped function or a generator raises on any replica.
        """
        try:
            local_batch = self._next_batch("next")
        except BaseException as error:
            hide_internal_frames(error)
            raise
        if local_batch is None:
            raise StopIteration
        return self._distributed(local_batch)

    def get_next(self) -> Any:
        """Return this step's batch, like `next`. Collective.

        Raises, on all replicas:
          OutOfRangeError: after the last step.
          What `next` raises.
        """
        try:
            local_batch = self._next_batch("get_next")
        except BaseException as error:
            hide_internal_frames(error)
            raise
        if local_batch is None:
            raise OutOfRangeError(f"the dataset has ended after {self._step} steps")
        return self._distributed(local_batch)

    def get_next_as_optional(self) -> Optional:
        """Return this step's batch as an `Optional`, empty after the end. Collective.

        Raises, on all replicas: what `next` raises, except StopIteration.
        """
        try:
            local_batch = self._next_batch("get_next_as_optional")
        except BaseException as error:
            hide_internal_frames(error)
            raise
        # An empty Optional on all ranks: the end is agreed on.
        optional = Optional(*([self._distributed(local_batch)] if local_batch else []))
        optional._spec_of = self
        return optional

    def _next_batch(self, name: str) -> LocalBatch | None:
        """Return this replica's batch of the next step; None on all after the last.

        Collective. `name` is that of the public call.
        """
        # Inside `run` ranks may be at different calls: refuse before anything is sent.
        self._require_callable(name)
        counters = self._plan.extended.consensus.recorder.counters
        counters.mark(NEXT)
        # Waiting for other ranks counts as communication, the rest of `next` as input.
        begun, communication = time.monotonic_ns(), counters.communication
        local_batch = self._advance()
        counters.end_input(begun, communication)
        if local_batch is None:
            counters.end_epoch(self._plan.has_cache)
            for watcher in self._plan.extended.batch_watchers:
                watcher.end(self._plan, self._epoch)
        return local_batch

    def _distributed(self, local_batch: LocalBatch) -> Any:
        extended, batch = self._plan.extended, local_batch.batch
        if extended.batch_watchers:
            for watcher in extended.batch_watchers:
                watcher.watch(self._plan, self._epoch, self._step - 1, batch)
        if extended.is_default:
            return batch
        return values.regroup(batch, extended.replica_id)

    def get_state(self) -> dict[str, int]:
        """Return the position of this iterator: a few integers, each below 2**63.

        Not collective, but equal on all replicas: the epoch, the number of its steps
        that `next` has returned, the seeds of shuffles without one, and hashes that
        identify the dataset. Prefetched batches do not count.
        """
        self._epochs.is_saved = True
        # Equal on all ranks by construction, so nothing needs to be exchanged.
        return make_state(self._plan.origin, self._epoch, self._step)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue where `get_state` of an iterator over an equal dataset was called.

        Collective. The rest of the epoch has the same global order, and the dataset's
        next iteration is the epoch after it. The state may come from a different number
        of replicas, or from `iter(dataset)` of the undistributed dataset. Exceptions:
        if each replica has its own data (AutoShardPolicy.FILE,
        `distribute_datasets_from_function`), the number of replicas must be equal; with
        OFF, the batch sizes.

        Datasets are equal if their transformations, numbers of rows and file names
        (without folders) are equal. Functions and the contents of arrays are not
        compared. Seeking is O(1), except that generators must yield the earlier
        elements again.

        Raises, on all replicas, without changing the iterator:
          ArgumentTypeError: `state` is not a dict of integers.
          ArgumentError: the state is of another dataset (the message says how),
            or the call is inside a function that `Strategy.run` runs.
          MismatchError: the replicas passed different states.
        Raises, on all replicas, and must be called again before `next`:
          DataError: generators yield too few elements.
          What a mapped function or a generator raises on any replica.
        """
        self._require_callable("set_state")
        plan, consensus = self._plan, self._plan.extended.consensus

        def describe(at: tuple[Epoch, int]) -> list[tuple[str, Any]]:
            epoch, step = at
            where = [
                ("the iterator", plan.name),
                ("epoch", epoch.number),
                ("step", step),
            ]
            seeds = zip(seed_names(epoch), epoch.seeds.values())
            return [*where, *((f"the state's {name}", n) for name, n in seeds)]

        # A wrong state on one rank raises on all, before anything has changed
        epoch, step = consensus.run(
            _SET_STATE,
            read_state,
            state,
            plan.origin,
            plan.pipeline,
            self._epoch,
            same=describe,
        )
        # Threads of the old position end before files are opened at the new one.
        self.close()
        reorder(plan.extended, plan.pipeline, epoch)
        self._start(epoch, step)
        if plan.is_open_ended:
            self._skip(step)
        # The next iteration over the dataset follows the state's epoch.
        self._epochs.resume_after(epoch)
        self._epochs.is_saved = True

    def _would_repeat_rows(self) -> bool:
        is_within = 0 < self._step != self._plan.cardinality and not self._is_closed
        return is_within and not self._epochs.is_saved

    def close(self) -> None:
        """End the iteration: end threads, close files. Not collective."""
        self._is_closed = True
        self._prefetcher.close()

    def abandon(self) -> None:
        """Close after an error elsewhere, which all ranks raise.

        Ranks may be at different steps, so later collectives must not compare them.
        """
        self.close()
        self._record_progress(None)

    def _require_callable(self, name: str) -> None:
        if context.in_replica_function():
            raise ArgumentError(
                f"{name} was called on a distributed iterator inside a replica function"
                "; call it outside, and pass the batches to strategy.run in args"
            )
        if (topology := self._plan.extended.topology).closed:
            topology.require_open()

    def _skip(self, steps: int) -> None:
        """Skip the first steps of generators. Collective."""
        plan, consensus = self._plan, self._plan.extended.consensus
        try:
            skipped_by_rank = consensus.gather_objects(
                _SET_STATE, lambda: self._prefetcher.skip(steps)
            )
            # With own data per replica, those with less data may have ended before
            if (
                min(skipped_by_rank) if plan.is_global else max(skipped_by_rank)
            ) < steps:
                ends = group_by_rank([f"after {n} steps" for n in skipped_by_rank])
                raise DataError(
                    f"the state is after {steps} steps, but the datasets end {ends}"
                )
        except Exception as error:
            self._fail(error)
            raise

    def _advance(self) -> LocalBatch | None:
        """Return this step's batch, or None on all replicas at the end."""
        if self._failure is not None:
            raise DataError(self._failure)
        if self._is_closed or self._step == self._plan.cardinality:
            self._record_progress(None)
            self._end()
            return None
        try:
            local_batch = self._agree()
        except Exception as error:
            self._fail(error)
            raise
        if local_batch is None:
            self._end()
        else:
            self._step += 1
        return local_batch

    def _end(self) -> None:
        """End the threads, but keep files open for the next epoch."""
        self._is_closed = True
        self._prefetcher.end()

    def _fail(self, error: Exception) -> None:
        """Close everything; the next call retries the step, if possible."""
        self.close()
        # Indexed datasets can read the step again; a generator cannot.
        if not self._plan.is_open_ended:
            self._start(self._epoch, self._step)
            return
        self._failure = (
            f"step {self._step} of a generator's dataset failed ({error!r}), and a "
            "generator cannot continue after an error; iterate over the dataset again"
        )

    def _agree(self) -> LocalBatch | None:
        """Return this replica's batch once all replicas have theirs. Collective."""
        plan, step = self._plan, self._step
        # The replicas have already agreed on the group of this step: the fast path
        if step < self._agreed_until:
            plan.extended.consensus.progress.set(self._progress_key, step + 1)
            return self._read()
        where = ("the iterator", plan.name), ("epoch", self._epoch.number)
        if not plan.is_open_ended:
            return self._agree_on_rows(where)
        # This replica's own batch may be missing; then it needs an empty one like the
        # others'
        if not plan.is_global:
            return self._read_own((*where, ("step", step)))

        def describe(batch: LocalBatch | None) -> CallSignature:
            return global_call(_NEXT, where, step, batch)

        local_batch = self._agree_on(describe, self._read)
        self._template = local_batch.template if local_batch else self._template
        return local_batch

    def _agree_on_rows(self, where: Any) -> LocalBatch | None:
        """Return this replica's batch; replicas agree once per step group.

        In a group with an error they agree on each step.

        Raises:
          MismatchError: functions make other dtypes on some replicas.
        """
        step, prefetcher = self._step, self._prefetcher
        # `most` is the same on all ranks; a rank near its end may have fewer steps
        most = 1 if self._agrees_per_step else prefetcher.max_group_size
        stop = step + min(most, prefetcher.group_size(step))
        call = CallSignature(_NEXT, (*where, ("steps at a time", most)), step=step)

        def describe(_: object) -> CallSignature:
            if (kinds := prefetcher.reader.kinds) is None or not self._plan.is_global:
                return call
            return call._replace(spec=kinds.spec, leaves=kinds.dtypes)

        if stop - step > 1:
            if step >= self._per_step_until:
                try:
                    self._agree_on(describe, prefetcher.require_group, step)
                    steps = self._plan.cardinality
                    self._agreed_until = stop if steps < 0 else min(stop, steps)
                except UnreadError:  # on all replicas
                    self._per_step_until = stop
            self._record_progress(step + 1)
        if step < self._agreed_until:
            return self._read()
        return self._agree_on(describe, self._read)

    def _agree_on(
        self, describe: Callable[[T], CallSignature], read: Callable[..., T], *args: Any
    ) -> T:
        """Return `read(*args)`; see `Consensus.run`. Collective."""
        consensus = self._plan.extended.consensus
        # Other threads may still read: leave them the core
        yields = not self._plan.is_open_ended
        try:
            return consensus.run(_NEXT, read, *args, same=describe, yield_cpu=yields)
        except Exception:
            raise
        except BaseException as error:  # this rank alone exits, or is interrupted
            consensus.mark_broken(error)
            raise

    def _record_progress(self, step: int | None) -> None:
        progress = self._plan.extended.consensus.progress
        if step is None:
            progress.remove(self._progress_key)
        else:
            progress.set(self._progress_key, step)

    def _read_own(self, where: Any) -> LocalBatch | None:
        """Return the batch, or one without rows while others have rows. Collective.

        In the first step, replicas exchange the specs of their batches.
        """
        is_first, consensus = self._template is None, self._plan.extended.consensus
        batches: list[LocalBatch | None] = []  # the one that `read` returned

        def read() -> Any:
            batches.append(batch := self._read())
            return where, batch is not None and (
                not is_first or BatchSpec.of(batch.template)
            )

        by_rank = consensus.gather_objects(_NEXT, read)
        require_equal(_NEXT, "the place", [place for place, _ in by_rank])
        specs = [spec for _, spec in by_rank]
        if not any(specs):
            return None
        if not all(specs):
            self._require_replaceable(specs, is_first)
        if is_first:
            texts = [spec.text if spec else "missing" for spec in specs]
            require_equal(_NEXT, "the batch", texts)
        local_batch = batches[0]
        if local_batch is not None:
            self._template = local_batch.template
        if all(specs):
            return local_batch

        def fill() -> LocalBatch:
            if self._template is None:  # on this rank the class may not exist
                self._template = next(spec for spec in specs if spec).load()
            return local_batch or LocalBatch(
                empty_on_device(self._plan, self._template)
            )

        return consensus.run(_NEXT, fill)

    def _require_replaceable(self, specs: Sequence[Any], is_first: bool) -> None:
        """Raise, on all ranks, if ranks that ended cannot get batches without rows."""
        ended = name_ranks([rank for rank, spec in enumerate(specs) if not spec])
        first = next(spec for spec in specs if spec)
        have_rows = first.has_rows if is_first else _have_rows(self._template)
        if not (self._plan.is_batched and have_rows):
            raise MismatchError(
                f"{_NEXT}: the dataset of {ended} has ended at step {self._step}, "
                "other datasets have not, and single elements cannot be replaced by "
                "batches of zero rows; call batch()"
            )
        if self._template is None and not all(s.pickled for s in specs if s):
            raise DataError(
                f"{_NEXT}: the dataset of {ended} has no more batches, and the other "
                "ranks cannot send the structure of theirs, because it cannot be "
                "pickled"
            )

    def _read(self) -> LocalBatch | None:
        try:
            return device_put(self._prefetcher.read(self._step))
        except BaseException as error:
            hide_internal_frames(error)  # before other ranks show its traceback
            raise

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self._prefetcher.close(wait=False)


def global_call(
    operation: str, where: Any, step: int, local_batch: LocalBatch | None
) -> CallSignature:
    """Return the call signature of a step, in which replicas' global batches agree."""
    if local_batch is None:
        missing = ("the batch", "missing, as the dataset has ended")
        return CallSignature(operation, (*where, missing), step=step)
    leaves, spec = nest.flatten(local_batch.template)
    described = tuple((a.dtype.name, f"rows of shape {a.shape[1:]}") for a in leaves)
    there = ("the batch", f"there, with {local_batch.rows} rows,")
    return CallSignature(operation, (*where, there), spec, described, step)


class BatchSpec(NamedTuple):
    """Structure, dtypes and dimensions of batches, to be sent to other replicas.

    Args:
      text: for comparison and error messages.
      pickled: arrays without rows; None if their structure cannot be pickled.
      has_rows: whether no leaf is a scalar.
    """

    text: str
    pickled: bytes | None
    has_rows: bool

    @classmethod
    def of(cls, template: Any) -> BatchSpec:
        """Return the spec of batches like `template`."""
        leaves, spec = nest.flatten(template)
        kinds = [f"{dtype_text(a.dtype)} {a.ndim} dimensions" for a in leaves]
        text = f"{spec} of {kinds}"
        try:
            pickled = pickle.dumps(template)
            pickle.loads(pickled)
        except Exception:  # say, a local class, or whatever a class raises
            pickled = None
        return cls(text, pickled, _have_rows(template))

    def load(self) -> Any:
        """Return the arrays without rows."""
        return None if self.pickled is None else pickle.loads(self.pickled)


def _have_rows(template: Any) -> bool:
    return all(leaf.ndim for leaf in nest.flatten(template)[0])


def require_equal(operation: str, name: str, things: Sequence[Any]) -> None:
    """Raise, on all ranks, if values that the ranks exchanged differ."""
    if len(set(things) - {"missing"}) > 1:
        raise MismatchError(
            f"{operation}: the replicas differ: {name} is "
            f"{group_by_rank(list(map(str, things)))}"
        )
