"""Datasets divided over replicas: the part of each batch that this replica reads.

Every step of an iteration is collective: before a batch is handed out, all replicas
have theirs, or all raise.
"""

from __future__ import annotations

import collections
import dataclasses
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mpidist import arrays, context, nest
from mpidist.calls import Call
from mpidist.data.dataset import INFINITE_CARDINALITY, Dataset
from mpidist.data.pipeline import Pass, Pipeline
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.options import InputOptions

if TYPE_CHECKING:
    from mpidist.extended import StrategyExtended

__all__ = ["DistributedDataset", "DistributedIterator", "InputContext"]


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What an input function is told about the input pipeline that it makes.

    Args:
      num_input_pipelines: how many there are, one per replica.
      input_pipeline_id: the number of this one.
      num_replicas_in_sync: the number of replicas.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica.

        Raises:
          ArgumentError: it is no whole number.
        """
        replicas = self.num_replicas_in_sync
        if global_batch_size % replicas:
            below = global_batch_size // replicas * replicas
            sizes = f"{below} or {below + replicas}" if below else f"{replicas}"
            raise ArgumentError(
                f"global_batch_size {global_batch_size} does not divide by {replicas} "
                f"replicas; use {sizes}"
            )
        return global_batch_size // replicas

    def __str__(self) -> str:
        return (
            f"mpidist.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What this replica reads: equal on all replicas but for the pipeline.

    Args:
      pipeline: of batches.
      is_global: whether batches are global ones, of which this replica takes a slice.
      steps: how many steps all replicas take, None for no end.
      entropy: the seed of shuffles that were given none.
      options: see `InputOptions`.
      serial: which dataset of the strategy this is.
    """

    extended: StrategyExtended
    pipeline: Pipeline
    is_global: bool
    steps: int | None
    entropy: int
    options: InputOptions
    serial: int

    def load(self, order: Pass, step: int) -> Any:
        """Return this replica's batch of one step; not collective, in any thread."""
        length = self.pipeline.length
        if length is not None and step >= length:
            batch = self.pipeline.empty_part(order)
        elif self.is_global:
            replicas, replica = self.extended.num_replicas, self.extended.replica_id
            batch = self.pipeline.part(order, step, replicas, replica)
        else:
            batch = self.pipeline.element(order, step)
        if self.options.experimental_fetch_to_device:
            device = self.extended.device
            batch = nest.map_leaves(lambda a: arrays.to_device(a, device), batch)
        return batch


class DistributedDataset:
    """A dataset of which each replica gets its part; iterate over it with `for`.

    Made by the strategy. Each iteration starts again, with the next epoch's order.
    """

    def __init__(self, plan: _Plan):
        self._plan = plan
        self._epoch = 0

    @classmethod
    def of_global_batches(
        cls, extended: StrategyExtended, dataset: Dataset, options: InputOptions | None
    ) -> DistributedDataset:
        """See `Strategy.experimental_distribute_dataset`."""
        call = "experimental_distribute_dataset"
        extended.topology.require_open()

        def prepare() -> tuple[str, int | None]:
            _require_dataset(dataset, call)
            if dataset.pipeline.batch_size is None:
                raise ArgumentError(
                    f"{call} needs a dataset of batches; call batch(GLOBAL_BATCH_SIZE) "
                    "on it first"
                )
            return dataset.pipeline.describe(), dataset.pipeline.length

        # Replicas that read other data than the rest must not go unnoticed
        description, steps = extended.agreement.prepare(call, prepare)
        agreed = (("dataset", description), ("batches", steps))
        extended.agreement.require_same(Call(call, agreed))
        entropy = _draw(extended, dataset.pipeline.needs_entropy)
        return cls(
            _Plan(
                extended,
                dataset.pipeline,
                is_global=True,
                steps=steps,
                entropy=entropy,
                options=options or InputOptions(),
                serial=extended.agreement.calls,
            )
        )

    @classmethod
    def from_function(
        cls,
        extended: StrategyExtended,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None,
    ) -> DistributedDataset:
        """See `Strategy.distribute_datasets_from_function`."""
        call = "distribute_datasets_from_function"
        where = InputContext(
            extended.num_replicas, extended.replica_id, extended.num_replicas
        )

        def make() -> tuple[Dataset, int, bool]:
            dataset = dataset_fn(where)
            _require_dataset(dataset, call)
            is_batched = dataset.pipeline.batch_size is not None
            return dataset, dataset.cardinality(), is_batched

        dataset, cardinality, is_batched = extended.together(Call(call), make)
        everyone = extended.agreement.gather(call, (cardinality, is_batched))
        lengths = [length for length, _ in everyone]
        if all(batched for _, batched in everyone):
            _require_like_elements(extended, call, dataset)
        elif len(set(lengths)) > 1:
            raise ArgumentError(
                f"{call}: the replicas' datasets have {lengths} elements and are not "
                "batched, so a replica that runs out has nothing to give; call batch()"
            )
        steps = None if INFINITE_CARDINALITY in lengths else max(lengths)
        return cls(
            _Plan(
                extended,
                dataset.pipeline,
                is_global=False,
                steps=steps,
                entropy=_draw(extended, needed=True),
                options=options or InputOptions(),
                serial=extended.agreement.calls,
            )
        )

    @property
    def cardinality(self) -> int:
        """The number of steps, the same on all replicas; -1 for no end."""
        steps = self._plan.steps
        return INFINITE_CARDINALITY if steps is None else steps

    def __len__(self) -> int:
        if self._plan.steps is None:
            raise TypeError("an infinite dataset has no length")
        return self._plan.steps

    def __iter__(self) -> DistributedIterator:
        order = Pass(self._epoch, self._plan.entropy)
        self._epoch += 1
        return DistributedIterator(self._plan, order)


class DistributedIterator:
    """One pass over a distributed dataset. `next` is collective.

    Batches are read ahead in a thread, which ends with the iteration, or when the
    iterator is closed or forgotten.
    """

    def __init__(self, plan: _Plan, order: Pass):
        self._plan = plan
        self._order = order
        self._step = 0
        self._ahead: collections.deque[Future[Any]] = collections.deque()
        depth = plan.options.experimental_per_replica_buffer_size
        self._depth = depth
        self._is_closed = False
        self._reader = ThreadPoolExecutor(1, "mpidist-input") if depth else None

    def __iter__(self) -> DistributedIterator:
        return self

    def __next__(self) -> Any:
        """Return this step's batch of all replicas, a nest of `PerReplica`. Collective.

        With one replica, the bare batch.

        Raises, on all replicas:
          StopIteration: after the last step.
          DataError: a replica's rows cannot be read.
          ArgumentError: called inside a function that `Strategy.run` runs.
          What a mapped function raises on any replica.
        """
        if not context.in_cross_replica_context() and context.has_strategy():
            raise ArgumentError(
                "next was called on a distributed iterator inside a replica function; "
                "call it outside, and pass the batch in the args of strategy.run"
            )
        plan, extended = self._plan, self._plan.extended
        extended.topology.require_open()
        if self._is_closed or (plan.steps is not None and self._step >= plan.steps):
            self.close()
            raise StopIteration
        where = ("dataset", plan.serial), ("epoch", self._order.epoch)
        call = Call("next of a distributed dataset", (*where, ("step", self._step)))
        try:
            batch = extended.together(call, self._load)
        except Exception:
            self._drop_ahead()  # another call tries this step again
            raise
        self._step += 1
        return context.regroup(batch, extended.replica_id, extended.num_replicas)

    get_next = __next__

    def close(self) -> None:
        """End the iteration and the thread that reads ahead. Not collective."""
        self._is_closed = True
        self._drop_ahead()
        if self._reader is not None:
            self._reader.shutdown(wait=True)
            self._reader = None

    def _drop_ahead(self) -> None:
        while self._ahead:
            self._ahead.popleft().cancel()

    def __del__(self) -> None:
        reader = getattr(self, "_reader", None)
        if reader is not None:
            reader.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> Any:
        if self._reader is None:
            return self._plan.load(self._order, self._step)
        # Keep `depth` batches in the making beyond the one that is handed out
        last = self._step + 1 + self._depth
        if self._plan.steps is not None:
            last = min(last, self._plan.steps)
        while self._step + len(self._ahead) < last:
            step = self._step + len(self._ahead)
            self._ahead.append(
                self._reader.submit(_load, self._plan, self._order, step)
            )
        return self._ahead.popleft().result()


def _load(plan: _Plan, order: Pass, step: int) -> Any:
    """Call `plan.load` in the reading thread, which must not know the iterator."""
    return plan.load(order, step)


def _require_dataset(dataset: Any, call: str) -> None:
    if not isinstance(dataset, Dataset):
        raise ArgumentTypeError(f"{call} needs a mpidist.Dataset, not {dataset!r}")


def _require_like_elements(
    extended: StrategyExtended, call: str, dataset: Dataset
) -> None:
    """Raise if the replicas' batches differ in structure, dtypes or dimensions."""

    def describe() -> Call:
        leaves, spec = nest.flatten(dataset.pipeline.empty_part(Pass()))
        kinds = tuple((a.dtype.name, f"{a.ndim} dimensions") for a in leaves)
        return Call(call, (), spec, kinds)

    extended.agreement.require_same(extended.agreement.prepare(call, describe))


def _draw(extended: StrategyExtended, needed: bool) -> int:
    """Return a random seed that all replicas share. Collective if it is needed."""
    if not needed:
        return 0
    return extended.agreement.root_only("seed", lambda: secrets.randbits(62))
