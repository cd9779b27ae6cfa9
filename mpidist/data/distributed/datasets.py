"""Distributed datasets: which part of the data each replica reads.

Construction is collective: if the replicas' datasets do not match, all replicas raise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidist.comm.consensus.signatures import CallSignature, name_ranks
from mpidist.comm.replica_group import show_once
from mpidist.data.contents import describe_contents
from mpidist.data.dataset import (
    Dataset,
    DatasetLike,
    as_dataset,
    require_end,
    require_length,
    rows_are_known,
)
from mpidist.data.distributed.iterator import DistributedIterator
from mpidist.data.distributed.reader import ReadPlan, count_steps, divide, is_global
from mpidist.data.distributed.shared_caches import require_shareable, share
from mpidist.data.elements import dtype_text
from mpidist.data.iter_dataset import UNKNOWN_CARDINALITY, IterDataset
from mpidist.data.iterator import EpochCounter, Origin, draw_numbers
from mpidist.data.map_dataset import Epoch, MapDataset, drawn_seeds, walk
from mpidist.data.ordering import is_reshuffled
from mpidist.data.shuffling import Seed
from mpidist.data.sources import IndexedSource
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError
from mpidist.hdf5.linked_files import (
    OutputPart,
    Parts,
    require_complete,
    require_distinct,
)
from mpidist.options import AutoShardPolicy, InputOptions
from mpidist.util import near_misses, nest, validation
from mpidist.util.available_memory import free_bytes
from mpidist.util.logs import warn
from mpidist.util.representation import html_table, one_line
from mpidist.util.shares import BatchShare, even_sizes, largest_share
from mpidist.util.tracebacks import hide_internal_frames

if TYPE_CHECKING:
    from mpidist.comm.replica_group import ReplicaGroup

# A rank keeps short rows of at most this size in memory, and the ranks of a node take
# at most this part of its free memory for them
_KEPT_BYTES = 256 << 20
_MEMORY_SHARE = 16


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The argument of an input function: which input pipeline to create.

    Args:
      num_input_pipelines: number of input pipelines, one per replica.
      input_pipeline_id: index of this pipeline.
      num_replicas_in_sync: number of replicas.

    Raises:
      ArgumentError: a number is too small.
      ArgumentTypeError: an argument is not an integer.

    Example:
      >>> context = mpidist.InputContext(2, 1, 2)
      >>> context.get_per_replica_batch_size(64)
      32
      >>> print(context)
      mpidist.InputContext(input pipeline id 1, total: 2)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        validation.integer("num_input_pipelines", self.num_input_pipelines, 1)
        validation.integer("input_pipeline_id", self.input_pipeline_id, 0)
        validation.integer("num_replicas_in_sync", self.num_replicas_in_sync, 1)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica.

        Raises:
          ArgumentError: the result is not a whole number, or < 1.
          ArgumentTypeError: `global_batch_size` is not an integer.
        """
        global_batch_size = validation.integer(
            "global_batch_size", global_batch_size, 1
        )
        replicas = self.num_replicas_in_sync
        if global_batch_size % replicas:
            sizes = " or ".join(map(str, even_sizes(global_batch_size, replicas)))
            raise ArgumentError(
                f"global_batch_size {global_batch_size} is not divisible by {replicas} "
                f"replicas; use {sizes}"
            )
        return global_batch_size // replicas

    def __str__(self) -> str:
        return (
            f"mpidist.InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )


class DistributedDataset:
    """A dataset divided over the replicas; iterate over it with `for`.

    Created by the strategy. Each iteration is a new epoch, with its own order.

    Example:
      >>> rows = mpidist.Dataset.range(5).batch(4)
      >>> train = strategy.experimental_distribute_dataset(rows)
      >>> [int(strategy.reduce("SUM", batch, axis=0)) for batch in train]
      [6, 4]
    """

    def __init__(self, plan: ReadPlan, epochs: EpochCounter):
        self._plan = plan
        self._epochs = epochs
        plan.extended.consensus.note_made(plan.name)
        plan.extended.inputs.add(self)
        # A line at the start of the job, without communication or reading rows.
        show_once(
            plan.extended,
            "input",
            lambda: f"mpidist: the first dataset: {summarize(plan)}",
        )

    def __repr__(self) -> str:
        return one_line(self, self._describe)

    def _repr_html_(self) -> str:
        rows = [("", self._describe()), ("replicas", self._plan.extended.num_replicas)]
        return html_table(type(self).__name__, rows)

    def _describe(self) -> str:
        pipeline = self._plan.pipeline
        if isinstance(pipeline, MapDataset) and not rows_are_known(pipeline):
            return f"{pipeline.file_count:,} files, not opened yet"
        return summarize(self._plan)

    @classmethod
    def of_global_batches(
        cls,
        extended: ReplicaGroup,
        dataset: DatasetLike,
        options: InputOptions | None,
        call: str = "experimental_distribute_dataset",
    ) -> DistributedDataset:
        """Return a dataset whose batches are divided over the replicas. Collective."""
        extended.topology.require_open()

        def prepare() -> tuple[MapDataset | IterDataset, AutoShardPolicy, Any]:
            _require_options(options)
            whole = _as_dataset(dataset, call)
            _require_batches(whole, call)
            policy = whole.options().auto_shard_policy
            where = extended.num_replicas, extended.replica_id
            pipeline = divide(whole.pipeline, policy, *where)
            # FILE gives every rank another pipeline, other policies the same
            if policy is AutoShardPolicy.FILE:
                return pipeline, policy, None
            _share_indexes(extended, pipeline, call)
            require_shareable(pipeline)
            return pipeline, policy, Origin.of(pipeline, not is_global(policy))

        def describe(prepared: Any) -> list[tuple[str, Any]]:
            pipeline, policy, origin = prepared
            is_balanced = (options or InputOptions()).balance_batches
            agreed = [
                ("auto_shard_policy", policy.name),
                ("dataset", pipeline.describe()),
                ("shuffles without a seed", _seed_pattern(pipeline)),
                ("batches", origin.cardinality if origin else "its own"),
                ("balance_batches", is_balanced),
            ]
            if is_global(policy) and extended.num_replicas > 1:
                agreed += describe_contents(pipeline, extended.replica_id)
            return agreed

        # Replicas that read different data must be an error, not silent
        pipeline, policy, origin = extended.consensus.run(call, prepare, same=describe)
        if policy is AutoShardPolicy.FILE:
            return cls._of_own_batches(
                extended, lambda: pipeline, options, call, is_divided=True
            )
        chosen, seeds = options or InputOptions(), drawn_seeds(pipeline)
        offers = [_offer_seeds(seeds)]
        if seeds:  # an order must not differ between ranks
            offers = extended.consensus.gather_objects(call, lambda: offers[0])
        epochs = _agree_on_seeds(call, seeds, offers)
        # Of a generator all ranks read all; only indexed datasets are read in slices.
        is_sliced = is_global(policy) and isinstance(pipeline, MapDataset)
        slices = extended.num_replicas if is_sliced else 1
        first = BatchShare(slices, 0, chosen.balance_batches)
        plan = ReadPlan(
            extended,
            share(extended, pipeline, Epoch(0, epochs.seeds), first),
            is_global=is_global(policy),
            is_batched=True,
            cardinality=origin.cardinality,
            origin=origin,
            options=chosen,
            # The number of collective calls is the same on all ranks, so it names the
            # dataset.
            serial=extended.consensus.calls,
        )
        return cls(plan, epochs)

    @classmethod
    def from_function(
        cls,
        extended: ReplicaGroup,
        dataset_fn: Callable[[InputContext], DatasetLike],
        options: InputOptions | None,
        call: str = "distribute_datasets_from_function",
    ) -> DistributedDataset:
        """Return a dataset of the batches that each replica makes. Collective."""
        where = InputContext(
            extended.num_replicas, extended.replica_id, extended.num_replicas
        )

        def make() -> MapDataset | IterDataset:
            _require_options(options)
            function = validation.function("dataset_fn", dataset_fn)
            return _as_dataset(function(where), call).pipeline

        return cls._of_own_batches(extended, make, options, call)

    @classmethod
    def _of_own_batches(
        cls,
        extended: ReplicaGroup,
        make: Callable[[], MapDataset | IterDataset],
        options: InputOptions | None,
        call: str,
        is_divided: bool = False,
    ) -> DistributedDataset:
        """Return a dataset of each replica's own batches, which are not divided.

        `make` returns this replica's pipeline, and may fail or communicate;
        `is_divided`: of a dataset whose files the replicas share out.
        """

        def prepare() -> _OwnBatches:
            pipeline = make()
            parts, seeds = _index_own_files(extended, pipeline), drawn_seeds(pipeline)
            # All ranks need to know which rank runs out first, and whether all have
            # batches.
            own = Origin.of(pipeline), pipeline.is_batched, _offer_seeds(seeds)
            local = *own, parts
            by_rank = extended.consensus.gather_objects(call, lambda: local)
            origins, batched, offers, by_files = zip(*by_rank, strict=True)
            # Shards of one writer may be with several ranks
            everyone = [part for parts in by_files for part in parts]
            if is_divided:
                require_distinct(everyone)
            require_complete(everyone)
            lengths = [origin.cardinality for origin in origins]
            is_batched = all(batched)
            steps = count_steps(lengths)
            # Scalars cannot have zero rows, so unequal lengths cannot be evened out
            is_uneven = steps != UNKNOWN_CARDINALITY and len(set(lengths)) > 1
            if is_uneven and not is_batched:
                raise ArgumentError(
                    f"{call}: the replicas' datasets have {lengths} elements and are "
                    "not batched, so a replica that runs out has no elements left; "
                    "call batch()"
                )
            origin = Origin.of_own(origins, steps)
            epochs = _agree_on_seeds(call, seeds, offers)
            return _OwnBatches(pipeline, is_batched, steps, origin, epochs)

        batches = extended.consensus.run(
            call, prepare, same=functools.partial(_describe_elements, call)
        )
        plan = ReadPlan(
            extended,
            batches.pipeline,
            is_global=False,
            is_batched=batches.is_batched,
            cardinality=batches.cardinality,
            origin=batches.origin,
            options=options or InputOptions(),
            serial=extended.consensus.calls,
        )
        return cls(plan, batches.epochs)

    @property
    def cardinality(self) -> int:
        """The number of steps, equal on all replicas; -1 if endless, -2 if unknown."""
        return self._plan.cardinality

    @property
    def element_spec(self) -> Any:
        """A nest of `TensorSpec` like this replica's batches; None is the rows.

        Not collective: it may read an element of this replica.
        """
        return self._plan.pipeline.element_spec()

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return the state after one pass: `state = reduce_func(state, batch)`.

        Collective. It iterates over the next epoch.

        Args:
          initial_state: the first state; returned if there are no batches.
          reduce_func: called with the state and the step's batch, as returned by
            `next`, in the caller's context; returns the next state. It may call the
            strategy. States may differ between replicas.

        Raises, on all replicas:
          ArgumentError: the dataset is endless.
          ArgumentTypeError: `reduce_func` is not a function.
          What `reduce_func` raises on any replica, and what `next` raises.

        Example:
          >>> data = mpidist.Dataset.range(5).batch(4)
          >>> data = strategy.experimental_distribute_dataset(data)
          >>> data.reduce(0, lambda n, rows: n + int(strategy.reduce("SUM", rows, 0)))
          10
        """
        consensus, call = self._plan.extended.consensus, "DistributedDataset.reduce"
        require_end(self.cardinality, call)
        iterator = iter(self)

        def go_through() -> Any:
            function = validation.function("reduce_func", reduce_func)
            return functools.reduce(function, iterator, initial_state)

        try:
            return consensus.run(call, go_through)
        except BaseException as error:
            # Ranks may have stopped at different steps.
            iterator.abandon()
            hide_internal_frames(error)
            raise

    def _would_repeat_rows(self) -> bool:
        is_lost = self._epochs.has_begun and not self._epochs.is_saved
        return is_lost and is_reshuffled(self._plan.pipeline)

    if not TYPE_CHECKING:  # or every name would be one
        __getattr__ = near_misses.attribute_hint("distributed")

    def __len__(self) -> int:
        return require_length(self.cardinality)

    def __iter__(self) -> DistributedIterator:
        self._plan.extended.topology.require_open()
        return DistributedIterator(self._plan, self._epochs)


_has_warned = False


def warn_unsaved_place(extended: ReplicaGroup) -> None:
    """Warn once per job that a checkpoint lacks a place in the input.

    Rank 0 warns, after the states of what is saved were read. Not collective.
    """
    global _has_warned
    if _has_warned or extended.replica_id:
        return
    if (
        lost := next((i for i in extended.inputs if i._would_repeat_rows()), None)
    ) is None:
        return
    _has_warned = True
    warn(
        f"a checkpoint is saved without the place in the input, {lost!r}: a job that "
        "restores it reads the rows of the first epoch again, in the same order. Save "
        "the iterator, too: Checkpoint(..., batches=iter(dataset)), and iterate over "
        "checkpoint.batches. (Rank 0 warns, once)"
    )


def _as_dataset(value: Any, call: str) -> Dataset:
    if isinstance(value, DistributedDataset | DistributedIterator):
        raise ArgumentTypeError(f"{call}: {value!r} is distributed already")
    return as_dataset(value, call)


def _require_options(options: Any) -> None:
    if options is not None:
        validation.instance("options", options, InputOptions)


def _require_batches(dataset: Dataset, call: str) -> None:
    if not dataset.pipeline.is_batched:
        raise ArgumentError(
            f"{call} needs a dataset of batches; call batch(GLOBAL_BATCH_SIZE) on it "
            "first (or pass the function itself if it yields whole batches)"
        )


class _OwnBatches(NamedTuple):
    """The dataset that each replica has for itself; see `ReadPlan`."""

    pipeline: MapDataset | IterDataset
    is_batched: bool
    cardinality: int
    origin: Origin
    epochs: EpochCounter


class _SeedOffer(NamedTuple):
    """What a rank has drawn for a shuffle without a seed.

    Args:
      number: of the shuffle, for all datasets that are made from it.
      drawn: for this dataset.
      is_kept: whether rows have come in the order of `number`, or other ranks have it.
    """

    number: int
    drawn: int
    is_kept: bool


def _offer_seeds(seeds: Mapping[Seed, bool]) -> list[_SeedOffer]:
    """Return what this rank has drawn for the shuffles of a dataset."""
    return [
        _SeedOffer(seed.number, drawn, seed.is_used or seed.is_common)
        for seed, drawn in zip(seeds, draw_numbers(seeds), strict=True)
    ]


def _agree_on_seeds(
    call: str, seeds: Mapping[Seed, bool], offers: Sequence[Sequence[_SeedOffer]]
) -> EpochCounter:
    """Make the numbers of this rank's seeds those of rank 0; return the first epoch.

    Args:
      call: the user's.
      seeds: of the dataset on this rank.
      offers: of each rank. Where each has its own dataset, rank 0 may have fewer than
        others: then those of the next rank count.

    Raises, on all ranks:
      ArgumentError: a rank has used another order already, which must not change.
    """
    by_seed = list(itertools.zip_longest(*offers))
    chosen = [next(filter(None, by_rank)) for by_rank in by_seed]
    others = [_ranks_with_other_orders(*pair) for pair in zip(chosen, by_seed)]
    # Check all before any changes
    for seed, ranks in zip(seeds, others):
        if ranks and seed.is_fixed:
            raise ArgumentError(
                f"{call}: a shuffle without a seed has another order on "
                f"{name_ranks(ranks)}, where it was used before the dataset was "
                "distributed; give the shuffle a seed, or distribute first"
            )
    # States are equal on all ranks, also where the datasets are not
    padded = [*seeds, *(Seed() for _ in chosen[len(seeds) :])]
    for seed, offer, ranks in zip(padded, chosen, others, strict=True):
        if not ranks:
            seed.number = offer.number
            seed.is_common |= len(offers) > 1
    # What a rank has cached for itself stays there
    pairs = zip(padded, others, strict=True)
    fixed = {seed: seeds.get(seed, False) and not ranks for seed, ranks in pairs}
    return EpochCounter(fixed, [offer.drawn for offer in chosen])


def _ranks_with_other_orders(
    chosen: _SeedOffer, by_rank: Sequence[_SeedOffer | None]
) -> list[int]:
    return [
        rank
        for rank, offer in enumerate(by_rank)
        if offer and offer.is_kept and offer.number != chosen.number
    ]


def _seed_pattern(pipeline: MapDataset | IterDataset) -> str:
    # zip(a, a) and zip(a, b) are described alike
    seeds = list(drawn_seeds(pipeline))
    return str([seeds.index(s.seed) for s in walk(pipeline) if s.seed in seeds])


def _describe_elements(call: str, batches: _OwnBatches) -> CallSignature:
    """Return what the replicas' batches must have in common.

    A replica that has ended gives batches of zero rows like the others' batches. Those
    of unknown length are compared at each step.
    """
    if not batches.is_batched or batches.cardinality == UNKNOWN_CARDINALITY:
        return CallSignature(call)
    assert isinstance(batches.pipeline, MapDataset)
    leaves, spec = nest.flatten(batches.pipeline.empty_batch(Epoch()))
    # Only the number of dimensions: lengths may differ between replicas
    leaf_specs = tuple((dtype_text(a.dtype), f"{a.ndim} dimensions") for a in leaves)
    enums = ("enums with the members", str(batches.pipeline.members))
    return CallSignature(call, (enums,), spec, leaf_specs)


def _share_indexes(
    extended: ReplicaGroup, pipeline: MapDataset | IterDataset, call: str
) -> None:
    """Index the files of a dataset; one rank indexes each file for all. Collective.

    Called in a scope, which raises errors of one rank on all.

    Raises:
      MismatchError: the ranks name different files.
      DataError: a file is missing, damaged, or does not fit the others.
    """
    consensus = extended.consensus
    if not (sources := _sources(pipeline)):
        return
    # Compare the names first, or ranks would exchange indexes of different files
    names = tuple(("dataset", source.identify()) for source in sources)
    consensus.require_same(CallSignature(call, names))
    for source in sources:
        count = source.file_count
        # Round-robin, so the metadata server sees each file once
        inspected = range(consensus.rank, count, consensus.size)
        inspect = functools.partial(_inspect, source, inspected, consensus.rank)
        by_rank = consensus.gather_objects(call, inspect, senders=count)
        # Restore the order of the files: rank r has indexed r, r + size, ...
        files = [by_rank[i % len(by_rank)][i // len(by_rank)] for i in range(count)]
        # Of other sources no files belong together
        require_complete(getattr(source, "parts", lambda _: [])(files))
        source.set_index(files, consensus.rank, *_limits(extended))


def _index_own_files(
    extended: ReplicaGroup, pipeline: MapDataset | IterDataset
) -> Parts:
    """Index the files of this rank's own dataset; return `IndexedSource.parts`.

    Raises:
      DataError: a file is missing, damaged, or does not fit the others; it names the
        rank, as other ranks do not have this file.
    """
    rank = extended.consensus.rank
    parts: list[tuple[Path, OutputPart]] = []
    for source in _sources(pipeline):
        files = _inspect(source, range(source.file_count), rank)
        with _naming(rank):
            source.set_index(files, rank, *_limits(extended))
        parts += getattr(source, "parts", lambda _: [])(files)
    return parts


def _inspect(source: IndexedSource, files: range, rank: int) -> list[Any]:
    with _naming(rank):
        return source.inspect(files)


def _sources(pipeline: MapDataset | IterDataset) -> list[IndexedSource]:
    if isinstance(pipeline, IterDataset):
        return []
    return [s for s in pipeline.sources if isinstance(s, IndexedSource)]


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        named = DataError(f"{error} (on rank {rank})")
        named.origin_rank = rank  # type: ignore[attr-defined]  # as in `consensus`
        raise named from error


def _limits(extended: ReplicaGroup) -> tuple[int, int]:
    """Return how many threads may read, and the bytes of short rows to keep."""
    topology = extended.topology
    free = min(free_bytes(is_shared=False).values(), default=0)
    kept_bytes = min(_KEPT_BYTES, free // (_MEMORY_SHARE * topology.node_sizes[-1]))
    # One core is left for the computation
    return max(1, int(topology.core_share) - 1), kept_bytes


def summarize(plan: ReadPlan) -> str:
    """Return the sizes of the data and of each replica's part, as text.

    Not collective; reads no data.
    """
    parts, pipeline = [], plan.pipeline
    if isinstance(pipeline, MapDataset):
        if pipeline.file_count:
            parts.append(_count(pipeline.file_count, "file"))
        parts.append(_count(sum(map(len, pipeline.sources)), "row"))
    steps = plan.cardinality
    parts.append(_count(steps, "step") if steps >= 0 else "an unknown number of steps")
    rows, replicas = pipeline.batch_size, plan.extended.num_replicas
    if not plan.is_global:
        parts.append("on replica 0; each replica reads its own data")
    elif rows is None:
        parts.append(f"each divided over {replicas} replicas")
    else:
        share = largest_share(rows, replicas)
        parts.append(f"{_count(rows, 'row')} in each, {share:,} for a replica")
    return ", ".join(parts)


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'s' * (number != 1)}"
