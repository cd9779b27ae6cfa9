"""Going through a distributed dataset: every step is collective.

Before a batch is handed out, all replicas have theirs, or all raise.
"""

from __future__ import annotations

import collections
import pickle
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from mpidist import context, nest, regrouping
from mpidist.calls import Call, group_by_rank, name_ranks
from mpidist.data import feed
from mpidist.data.feed import Plan, Portion
from mpidist.data.pipeline import Pass
from mpidist.data.spec import spec_of
from mpidist.errors import ArgumentError, DataError, MismatchError, OutOfRangeError

__all__ = ["DistributedIterator", "Optional"]

_NEXT = "next of a distributed dataset"


class Optional:
    """A batch, or none: what `DistributedIterator.get_next_as_optional` returns.

    Example:
      >>> rows = mpidist.Dataset.range(4).batch(4)
      >>> iterator = iter(strategy.experimental_distribute_dataset(rows))
      >>> batch = iterator.get_next_as_optional()
      >>> while batch.has_value():
      ...     print(strategy.gather(batch.get_value(), axis=0))
      ...     batch = iterator.get_next_as_optional()
      [0 1 2 3]
    """

    def __init__(self, *values: Any):
        self._values = values

    def has_value(self) -> bool:
        """Return whether there is a batch; the same on all replicas."""
        return bool(self._values)

    def get_value(self) -> Any:
        """Return the batch.

        Raises:
          ArgumentError: there is none.
        """
        if not self._values:
            raise ArgumentError("the Optional has no value; ask has_value() first")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({', '.join(map(repr, self._values))})"


class DistributedIterator:
    """One pass over a distributed dataset. `next` is collective.

    Batches are read ahead in a thread (or more: see `Dataset.map`), which ends with the
    iteration, or when the iterator is closed or forgotten.

    Example:
      >>> rows = mpidist.Dataset.range(4).batch(4)
      >>> iterator = iter(strategy.experimental_distribute_dataset(rows))
      >>> next(iterator)  # on replica 0
      PerReplica:{
        0: array([0, 1])
      }
    """

    def __init__(self, plan: Plan, order: Pass):
        self._plan = plan
        self._epoch = order.epoch
        self._feed = feed.start(plan, order)
        self._step = 0
        self._kind: Any = None  # of no rows, once a batch was seen
        self._ahead: collections.deque[Future[Portion | None]] = collections.deque()
        depth = plan.options.experimental_per_replica_buffer_size
        threads = feed.count_readers(plan)
        # All threads have something to read while a batch is in use
        self._depth = max(depth, threads) if depth and threads > 1 else depth
        self._is_closed = False
        self._failure: str | None = None
        self._reader = ThreadPoolExecutor(threads, "mpidist-input") if depth else None

    @property
    def element_spec(self) -> Any:
        """A nest of `TensorSpec` like this replica's batches; None is the rows.

        Not collective: it may read an element of this replica.
        """
        if self._kind is not None:
            return spec_of(self._kind, self._plan.is_batched)
        return self._plan.pipeline.element_spec()

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """Return this step's batch of all replicas, a nest of `PerReplica`. Collective.

        With one replica, the bare batch.

        Raises, on all replicas:
          StopIteration: after the last step.
          DataError: a replica's rows cannot be read; or a generator failed before, and
            cannot go on.
          MismatchError: the batches of generators differ, or some have ended.
          ArgumentError: called inside a function that `Strategy.run` runs.
          What a mapped function or a generator raises on any replica.
        """
        batch = self.get_next_as_optional()
        if not batch.has_value():
            raise StopIteration
        return batch.get_value()

    def get_next(self) -> Any:
        """Return what `next` does. Collective.

        Raises, on all replicas:
          OutOfRangeError: after the last step.
          What `next` raises.
        """
        batch = self.get_next_as_optional()
        if not batch.has_value():
            raise OutOfRangeError(f"the dataset has ended after {self._step} steps")
        return batch.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return this step's batch as an `Optional`, empty after the end. Collective.

        Raises, on all replicas: what `next` raises but for StopIteration.
        """
        if not context.in_cross_replica_context() and context.has_strategy():
            raise ArgumentError(
                "next was called on a distributed iterator inside a replica function; "
                "call it outside, and pass the batch in the args of strategy.run"
            )
        extended = self._plan.extended
        extended.topology.require_open()
        portion = self._advance()
        if portion is None:
            return Optional()
        replica, replicas = extended.replica_id, extended.num_replicas
        return Optional(regrouping.regroup(portion.batch, replica, replicas))

    def close(self) -> None:
        """End the iteration and the threads that read ahead. Not collective."""
        self._is_closed = True
        self._drop_ahead()
        if self._reader is not None:
            self._reader.shutdown(wait=True)
            self._reader = None
        self._feed.close()

    def _advance(self) -> Portion | None:
        """Return this step's portion, or None on all replicas at the end."""
        if self._failure is not None:
            raise DataError(self._failure)
        if self._is_closed or self._step == self._plan.cardinality:
            self.close()
            return None
        try:
            portion = self._agree()
        except Exception as error:
            self._fail(error)
            raise
        if portion is None:
            self.close()
        else:
            self._step += 1
        return portion

    def _fail(self, error: Exception) -> None:
        """Prepare for another call: it tries the step again, if that is possible."""
        self._drop_ahead()
        if self._plan.is_open_ended:
            self._failure = (
                f"step {self._step} of a generator's dataset failed ({error!r}), and a "
                "generator cannot go on after that; iterate over the dataset again"
            )
            self.close()

    def _agree(self) -> Portion | None:
        """Return this replica's portion once all replicas have theirs. Collective."""
        plan, step = self._plan, self._step
        where = ("dataset", plan.serial), ("epoch", self._epoch), ("step", step)
        if not plan.is_open_ended:
            return plan.extended.together(Call(_NEXT, where), self._read)
        agreement = plan.extended.agreement
        portion = agreement.prepare(_NEXT, self._read)
        if not plan.is_global:
            return self._fill_in(where, portion)
        agreement.require_same(_global_call(where, portion))
        self._kind = portion.kind if portion else self._kind
        return portion

    def _fill_in(self, where: Any, portion: Portion | None) -> Portion | None:
        """Return `portion`, or one of no rows while others have rows. Collective.

        At the first step replicas show each other what their batches look like.
        """
        told: Any = portion is not None and (self._step > 0 or _show(portion.kind))
        everyone = self._plan.extended.agreement.gather(_NEXT, (where, told))
        _require_equal("the place", [place for place, _ in everyone])
        shown = [other for _, other in everyone]
        if not any(shown):
            return None
        if not all(shown):
            self._require_replaceable(shown)
        if self._step == 0:
            _require_equal("the batch", [k.text if k else "missing" for k in shown])
            self._kind = next(k for k in shown if k).load()
        if portion is None:
            return Portion(self._plan.place(self._kind))
        self._kind = portion.kind
        return portion

    def _require_replaceable(self, shown: Sequence[Any]) -> None:
        """Raise, on all ranks, if those that ended cannot get batches of no rows."""
        ended = name_ranks([rank for rank, kind in enumerate(shown) if not kind])
        if not self._plan.is_batched:
            raise MismatchError(
                f"{_NEXT}: the dataset of {ended} has ended at step {self._step}, the "
                "others have not, and elements that are no batches cannot be replaced "
                "by batches of no rows; call batch()"
            )
        if self._step == 0 and not all(k.pickled for k in shown if k):
            raise DataError(
                f"{_NEXT}: the dataset of {ended} is empty, and the other replicas "
                "cannot send it the structure of theirs, as it cannot be pickled"
            )

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft().cancel()

    def __del__(self) -> None:
        reader = getattr(self, "_reader", None)
        if reader is not None:
            reader.shutdown(wait=False, cancel_futures=True)

    def _read(self) -> Portion | None:
        if self._reader is None:
            return self._feed.read(self._step)
        # Keep `depth` batches in the making beyond the one that is handed out
        last = self._step + 1 + self._depth
        if self._plan.cardinality >= 0:
            last = min(last, self._plan.cardinality)
        while self._step + len(self._ahead) < last:
            step = self._step + len(self._ahead)
            # The thread must not know the iterator, or that would never be forgotten
            self._ahead.append(self._reader.submit(self._feed.read, step))
        return self._ahead.popleft().result()


def _global_call(where: Any, portion: Portion | None) -> Call:
    """Return what must be the same of the replicas' copies of a global batch."""
    if portion is None:
        return Call(_NEXT, (*where, ("the batch", "missing, as the dataset has ended")))
    leaves, spec = nest.flatten(portion.kind)
    described = tuple((a.dtype.name, f"rows of shape {a.shape[1:]}") for a in leaves)
    there = ("the batch", f"there, with {portion.rows} rows,")
    return Call(_NEXT, (*where, there), spec, described)


class _Kind(NamedTuple):
    """What batches look like, to be sent to other replicas."""

    text: str
    pickled: bytes | None

    def load(self) -> Any:
        """Return arrays of no rows."""
        return None if self.pickled is None else pickle.loads(self.pickled)


def _show(kind: Any) -> _Kind:
    leaves, spec = nest.flatten(kind)
    text = f"{spec} of {[f'{a.dtype.name} {a.ndim} dimensions' for a in leaves]}"
    try:
        return _Kind(text, pickle.dumps(kind))
    except (pickle.PicklingError, AttributeError, TypeError):  # say, a local class
        return _Kind(text, None)


def _require_equal(name: str, things: Sequence[Any]) -> None:
    """Raise, on all ranks, if what the ranks told of themselves differs."""
    if len(set(things) - {"missing"}) > 1:
        raise MismatchError(
            f"{_NEXT}: the replicas differ: {name} is "
            f"{group_by_rank(list(map(str, things)))}"
        )
