"""Going through a distributed dataset: every step is collective.

Before a batch is handed out, all replicas have theirs, or all raise.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpidist import context, values
from mpidist.comm.consensus.calls import Call, group_by_rank, name_ranks
from mpidist.data.distributed import prefetch, reader
from mpidist.data.distributed.prefetch import ReadAhead
from mpidist.data.distributed.reader import Plan, Portion
from mpidist.data.distributed.shared_caches import reorder
from mpidist.data.iterator_state import EpochCounter, make_state, read_state
from mpidist.data.map_dataset import Epoch
from mpidist.data.optional import Optional
from mpidist.data.spec import spec_of
from mpidist.errors import ArgumentError, DataError, MismatchError, OutOfRangeError
from mpidist.util import nest
from mpidist.util.tracebacks import fold

__all__ = [
    "DistributedIterator",
    "Kind",
    "global_call",
    "require_equal",
    "show",
]


_NEXT = "next of a distributed dataset"
_SET_STATE = "set_state of a distributed dataset"


class _UnreadError(Exception):
    """One of several steps cannot be read; the steps before it can."""


class DistributedIterator:
    """An iterator over a distributed dataset. `next` is collective.

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

    def __init__(self, plan: Plan, epochs: EpochCounter):
        self._plan = plan
        self._epochs = epochs
        depth = plan.options.experimental_per_replica_buffer_size
        self._threads = reader.count_readers(plan)
        # All threads have something to read while a batch is in use
        self._depth = max(depth, self._threads) if depth else 0
        self._agrees_singly = not plan.is_global or prefetch.can_fail(plan)
        self._start(epochs.next_epoch())

    def _start(self, epoch: Epoch, step: int = 0) -> None:
        """Be before a step, with nothing read ahead; before the first of a stream."""
        self._epoch = epoch
        self._step = step
        self._place = f"the step in epoch {epoch.number} of dataset {self._plan.serial}"
        self._agreed = 0  # the step up to which all replicas have theirs
        self._one_by_one = 0  # the step up to which they agree on each step
        self._reader = ReadAhead(
            prefetch.start(self._plan, epoch),
            self._depth,
            self._threads,
            self._plan.cardinality,
            step,
        )
        self._kind: Any = None  # of no rows, once a batch was seen
        self._is_closed = False
        self._failure: str | None = None

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
        try:
            batch = self.get_next_as_optional()
        except BaseException as error:
            fold(error)
            raise
        if not batch.has_value():
            raise StopIteration
        return batch.get_value()

    def get_next(self) -> Any:
        """Return what `next` does. Collective.

        Raises, on all replicas:
          OutOfRangeError: after the last step.
          What `next` raises.
        """
        try:
            batch = self.get_next_as_optional()
        except BaseException as error:
            fold(error)
            raise
        if not batch.has_value():
            raise OutOfRangeError(f"the dataset has ended after {self._step} steps")
        return batch.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return this step's batch as an `Optional`, empty after the end. Collective.

        Raises, on all replicas: what `next` raises but for StopIteration.
        """
        self._require_callable("next")
        extended = self._plan.extended
        try:
            portion = self._advance()
        except BaseException as error:
            fold(error)
            raise
        if portion is None:
            found = Optional()
        else:
            replica, replicas = extended.replica_id, extended.num_replicas
            found = Optional(values.regroup(portion.batch, replica, replicas))
        found._spec_of = self
        return found

    def get_state(self) -> dict[str, int]:
        """Return where this iterator is: a few integers, each below 2**63.

        Not collective, but equal on all replicas: the epoch, how many of its steps were
        handed out, the seed of shuffles that were given none, and hashes by which
        other datasets are known. Batches that were read ahead do not count.
        """
        return make_state(self._plan.origin, self._epoch, self._step)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Go on where `get_state` of an iterator over an equal dataset was called.

        Collective. The rest of the epoch comes in the same global order, and the
        dataset's next iteration is the epoch after it. The state may be of another
        number of replicas, or of `iter` of the dataset itself; but of as many replicas
        where each has data of its own (AutoShardPolicy.FILE,
        `distribute_datasets_from_function`), and of equal batches with OFF.

        Datasets are equal if their steps, numbers of rows and names of files are, in
        any folder; functions and the numbers in arrays are not looked at. Seeking is
        O(1); only generators must yield again what they had yielded.

        Raises, on all replicas, and changes nothing:
          ArgumentTypeError: `state` is no dict of integers.
          ArgumentError: it is of another dataset (the message says what differs), or
            this was called inside a function that `Strategy.run` runs.
          MismatchError: the replicas were given unlike states.
        Raises, on all replicas, and then needs another state:
          DataError: generators yield too few elements.
          What a mapped function or a generator raises on any replica.
        """
        self._require_callable("set_state")
        plan, agreement = self._plan, self._plan.extended.agreement
        epoch, step = agreement.prepare(
            _SET_STATE, lambda: read_state(state, plan.origin, plan.pipeline)
        )
        where = ("dataset", plan.serial), ("epoch", epoch.number), ("step", step)
        agreement.require_same(
            Call(_SET_STATE, (*where, ("the state's entropy", epoch.entropy)))
        )
        self.close()
        reorder(plan.extended, plan.pipeline, epoch)
        self._start(epoch, step)
        if plan.is_open_ended:
            self._skip(step)
        self._epochs.resume_after(epoch)

    def close(self) -> None:
        """End the iteration: threads end, files are closed. Not collective."""
        self._is_closed = True
        self._reader.close()

    def abandon(self) -> None:
        """Close it after an error that came up elsewhere, on all ranks.

        They may be at unlike steps, which later collectives must not ask for.
        """
        self.close()
        self._note_place(None)

    def _require_callable(self, name: str) -> None:
        """Raise where a collective method cannot be called."""
        if not context.in_cross_replica_context() and context.has_strategy():
            raise ArgumentError(
                f"{name} was called on a distributed iterator inside a replica function"
                "; call it outside, and pass batches in the args of strategy.run"
            )
        self._plan.extended.topology.require_open()

    def _skip(self, steps: int) -> None:
        """Go on after the first steps of generators. Collective."""
        plan, agreement = self._plan, self._plan.extended.agreement
        try:
            mine = agreement.prepare(_SET_STATE, lambda: self._reader.skip(steps))
            passed = agreement.gather(_SET_STATE, mine)
            # Where each replica has data of its own, one must have reached the step
            if (min(passed) if plan.is_global else max(passed)) < steps:
                ends = group_by_rank([f"after {n} steps" for n in passed])
                raise DataError(
                    f"the state is after {steps} steps, but the datasets end {ends}"
                )
        except Exception as error:
            self._fail(error)
            raise

    def _advance(self) -> Portion | None:
        """Return this step's portion, or None on all replicas at the end."""
        if self._failure is not None:
            raise DataError(self._failure)
        if self._is_closed or self._step == self._plan.cardinality:
            self._note_place(None)
            self._end()
            return None
        try:
            portion = self._agree()
        except Exception as error:
            self._fail(error)
            raise
        if portion is None:
            self._end()
        else:
            self._step += 1
        return portion

    def _end(self) -> None:
        """End the threads; the files stay open for the next epoch."""
        self._is_closed = True
        self._reader.end()

    def _fail(self, error: Exception) -> None:
        """Leave nothing open; another call tries the step again, if possible."""
        self.close()
        if not self._plan.is_open_ended:
            self._start(self._epoch, self._step)
            return
        self._failure = (
            f"step {self._step} of a generator's dataset failed ({error!r}), and a "
            "generator cannot go on after that; iterate over the dataset again"
        )

    def _agree(self) -> Portion | None:
        """Return this replica's portion once all replicas have theirs. Collective."""
        plan, step = self._plan, self._step
        if step < self._agreed:
            self._note_place(step + 1)
            return self._read()
        where = ("dataset", plan.serial), ("epoch", self._epoch.number)
        if not plan.is_open_ended:
            return self._agree_on_rows(where)
        agreement = plan.extended.agreement
        portion = agreement.prepare(_NEXT, self._read)
        if not plan.is_global:
            return self._fill_in((*where, ("step", step)), portion)
        agreement.require_same(global_call(_NEXT, where, step, portion))
        self._kind = portion.kind if portion else self._kind
        return portion

    def _agree_on_rows(self, where: Any) -> Portion | None:
        """Return this replica's portion; all agree at once on those read together."""
        most = 1 if self._agrees_singly else self._reader.most
        group = min(most, self._reader.group(self._step))
        call = Call(_NEXT, (*where, ("steps at a time", most)), step=self._step)
        if group > 1:
            self._agree_on_group(call, group)
            self._note_place(self._step + 1)
        if self._step < self._agreed:
            return self._read()
        return self._plan.extended.together(call, self._read, is_patient=True)

    def _agree_on_group(self, call: Call, group: int) -> None:
        """Find out if all replicas have the steps that are read together. Collective.

        After an error in one of them it does nothing.
        """
        step = self._step
        if step < self._one_by_one:
            return

        def read() -> None:
            if not self._reader.can_read_group(step):
                raise _UnreadError

        try:
            self._plan.extended.together(call, read, is_patient=True)
        except _UnreadError:  # on all replicas
            self._one_by_one = step + group
        else:
            steps = self._plan.cardinality
            self._agreed = step + group if steps < 0 else min(step + group, steps)

    def _note_place(self, step: int | None) -> None:
        """Tell the next collective at which step of the epoch this replica is."""
        places = self._plan.extended.agreement.places
        if step is None:
            places.forget(self._place)
        else:
            places.note(self._place, step)

    def _fill_in(self, where: Any, portion: Portion | None) -> Portion | None:
        """Return `portion`, or one of no rows while others have rows. Collective.

        At first replicas show each other what their batches look like.
        """
        is_first = self._kind is None
        told: Any = portion is not None and (not is_first or show(portion.kind))
        everyone = self._plan.extended.agreement.gather(_NEXT, (where, told))
        require_equal(_NEXT, "the place", [place for place, _ in everyone])
        shown = [other for _, other in everyone]
        if not any(shown):
            return None
        if not all(shown):
            self._require_replaceable(shown, is_first)
        if is_first:
            require_equal(
                _NEXT, "the batch", [k.text if k else "missing" for k in shown]
            )
            self._kind = next(k for k in shown if k).load()
        if portion is None:
            return Portion(prefetch.place(self._plan, self._kind))
        self._kind = portion.kind
        return portion

    def _require_replaceable(self, shown: Sequence[Any], is_first: bool) -> None:
        """Raise, on all ranks, if those that ended cannot get batches of no rows."""
        ended = name_ranks([rank for rank, kind in enumerate(shown) if not kind])
        of_first = next(kind for kind in shown if kind)
        have_rows = of_first.has_rows if is_first else _have_rows(self._kind)
        if not (self._plan.is_batched and have_rows):
            raise MismatchError(
                f"{_NEXT}: the dataset of {ended} has ended at step {self._step}, the "
                "others have not, and elements that are no batches cannot be replaced "
                "by batches of no rows; call batch()"
            )
        if self._kind is None and not all(k.pickled for k in shown if k):
            raise DataError(
                f"{_NEXT}: the dataset of {ended} is empty or over, and the others "
                "cannot send it the structure of theirs, as it cannot be pickled"
            )

    def _read(self) -> Portion | None:
        try:
            return prefetch.hand_out(self._reader.read(self._step))
        except BaseException as error:
            fold(error)  # what other ranks show of it
            raise

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            self._reader.close(wait=False)


def global_call(operation: str, where: Any, step: int, portion: Portion | None) -> Call:
    """Return what must be the same of the replicas' copies of a global batch."""
    if portion is None:
        missing = ("the batch", "missing, as the dataset has ended")
        return Call(operation, (*where, missing), step=step)
    leaves, spec = nest.flatten(portion.kind)
    described = tuple((a.dtype.name, f"rows of shape {a.shape[1:]}") for a in leaves)
    there = ("the batch", f"there, with {portion.rows} rows,")
    return Call(operation, (*where, there), spec, described, step)


class Kind(NamedTuple):
    """What batches look like, to be sent to other replicas."""

    text: str
    pickled: bytes | None
    has_rows: bool

    def load(self) -> Any:
        """Return arrays of no rows."""
        return None if self.pickled is None else pickle.loads(self.pickled)


def show(kind: Any) -> Kind:
    """Return what arrays of no rows look like, and those themselves if possible."""
    leaves, spec = nest.flatten(kind)
    text = f"{spec} of {[f'{a.dtype.name} {a.ndim} dimensions' for a in leaves]}"
    try:
        pickled = pickle.dumps(kind)
    except (pickle.PicklingError, AttributeError, TypeError):  # say, a local class
        pickled = None
    return Kind(text, pickled, _have_rows(kind))


def _have_rows(kind: Any) -> bool:
    """Return whether no leaf is a scalar."""
    return all(leaf.ndim for leaf in nest.flatten(kind)[0])


def require_equal(operation: str, name: str, things: Sequence[Any]) -> None:
    """Raise, on all ranks, if what the ranks told of themselves differs."""
    if len(set(things) - {"missing"}) > 1:
        raise MismatchError(
            f"{operation}: the replicas differ: {name} is "
            f"{group_by_rank(list(map(str, things)))}"
        )
