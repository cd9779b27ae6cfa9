"""Iteration over a dataset in one process; batches that may be missing.

Nothing here communicates.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidist import values
from mpidist.data import batching, caching, combining, ordering
from mpidist.data.elements import TensorSpec, spec_of
from mpidist.data.iter_dataset import IterDataset, IterStep, MapToIterDataset
from mpidist.data.map_dataset import Epoch, MapDataset, walk
from mpidist.data.shuffling import Seed, draw_number
from mpidist.errors import ArgumentError, ArgumentTypeError, DataError, OutOfRangeError
from mpidist.util import nest, validation
from mpidist.util.logs import warn
from mpidist.util.representation import one_line
from mpidist.util.serialization import hash62
from mpidist.util.threads import read_ahead
from mpidist.util.tracebacks import hide_internal_frames

if TYPE_CHECKING:
    from mpidist.data.distributed.iterator import DistributedIterator

_VERSION = 1
_SHOWN = 400
# Of datasets that OFF lets each replica read whole.
_EACH_READS_ALL = -1


class EpochCounter:
    """The next epoch of a dataset, shared by all of its iterators.

    Args:
      seeds: those that its shuffles have drawn, and whether it has their order in all
        epochs; see `drawn_seeds`.
      numbers: for this dataset; see `draw_numbers`.

    Attributes:
      seeds: the number of each seed in the current epoch.
      is_saved: whether the position of an iterator was asked for, or set.
    """

    def __init__(self, seeds: Mapping[Seed, bool], numbers: Sequence[int]):
        self._fixed = [seed for seed, is_fixed in seeds.items() if is_fixed]
        self._number = 0
        self.seeds: Mapping[Seed, int] = dict(zip(seeds, numbers, strict=True))
        self.is_saved = False

    @property
    def has_begun(self) -> bool:
        """Whether there is or was an iterator."""
        return self._number > 0

    def next_epoch(self) -> Epoch:
        """Return the next epoch, and advance."""
        # A state may have changed the numbers, for all datasets of a shuffle
        self.seeds = {**self.seeds, **{seed: seed.number for seed in self._fixed}}
        # The counter is common to all iterators of a dataset: each starts a new epoch.
        self._number += 1
        return Epoch(self._number - 1, self.seeds)

    def resume_after(self, epoch: Epoch) -> None:
        """Make the epoch after `epoch` the next one."""
        # Other datasets of the shuffle follow: the other part of a split
        for seed in self._fixed:
            seed.number = epoch.seeds[seed]
        self._number, self.seeds = epoch.number + 1, epoch.seeds


def draw_numbers(seeds: Mapping[Seed, bool]) -> list[int]:
    """Return the numbers of some seeds for a new dataset.

    Where a shuffle has another order in each epoch, it has another one in each dataset.
    """
    return [
        seed.number if is_fixed else draw_number() for seed, is_fixed in seeds.items()
    ]


class Origin(NamedTuple):
    """Identifies the dataset of a state; equal on all replicas, and contains no data.

    Args:
      replicas: number of replicas with own data; 0 if any number of replicas divides
        global batches, -1 if each reads all data.
      batch_size: rows per step, summed over replicas with own data; 0 if unknown.
      cardinality: steps per epoch, or INFINITE_ or UNKNOWN_CARDINALITY.
      source: hash of the sources: names of files without their folders, dtypes, shapes.
      dataset: hash of the sources and the transformations (without functions).
    """

    replicas: int
    batch_size: int
    cardinality: int
    source: int
    dataset: int

    @classmethod
    def of(
        cls, pipeline: MapDataset | IterDataset, each_reads_all: bool = False
    ) -> Origin:
        """Return the origin of a dataset that one process or all replicas read."""
        return cls(
            # 0 means: states fit any number of replicas, as global batches are
            # divided again.
            _EACH_READS_ALL if each_reads_all else 0,
            pipeline.batch_size or 0,
            pipeline.cardinality,
            # Hashes, as a state is a few integers and holds no names of files.
            hash62(pipeline.describe_source()),
            hash62(pipeline.describe()),
        )

    @classmethod
    def of_own(cls, origins: Sequence[Origin], cardinality: int) -> Origin:
        """Return the origin of the datasets of replicas that have own data.

        Args:
          origins: of each replica's dataset, by rank.
          cardinality: number of steps of all replicas.
        """
        return cls(
            len(origins),
            sum(o.batch_size for o in origins),
            cardinality,
            hash62(repr([o.source for o in origins])),
            hash62(repr([o.dataset for o in origins])),
        )


def make_state(origin: Origin, epoch: Epoch, step: int) -> dict[str, int]:
    """Return the state before a step of an epoch."""
    seeds = dict(zip(seed_names(epoch), epoch.seeds.values()))
    numbers = {"version": _VERSION, "epoch": epoch.number, "step": step}
    return {**numbers, "entropy": 0, **seeds, **origin._asdict()}


def seed_names(epoch: Epoch) -> list[str]:
    """Return the names of the numbers of an epoch's seeds in a state."""
    return ["entropy", *(f"entropy_{i}" for i in range(1, len(epoch.seeds)))]


def read_state(
    state: Any, origin: Origin, pipeline: MapDataset | IterDataset, current: Epoch
) -> tuple[Epoch, int]:
    """Return the epoch and the step of a state.

    Args:
      state: returned by `make_state`.
      origin: expected origin of the state.
      pipeline: the dataset that is read here, for messages.
      current: an epoch of it, with the same seeds.

    Raises:
      ArgumentTypeError: `state` is not a dict of integers.
      ArgumentError: it is of another dataset or version, or damaged.
    """
    names = seed_names(current)
    numbers = _require_integers(state, names)
    saved = Origin(*(numbers[name] for name in Origin._fields))
    if differences := _differences(saved, origin, pipeline):
        raise ArgumentError(
            f"the state is of another dataset: {'; '.join(differences)}"
        )
    step = numbers["step"]
    # A negative cardinality stands for endless or unknown: no upper limit then.
    if 0 <= origin.cardinality < step:
        raise ArgumentError(
            f"the state is at step {step}, but an epoch has {origin.cardinality} steps"
        )
    seeds = zip(current.seeds, map(numbers.__getitem__, names))
    return Epoch(numbers["epoch"], dict(seeds)), step


def _require_integers(state: Any, names: Sequence[str]) -> dict[str, int]:
    # State may come from JSON, so check everything before it is used.
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(
            "set_state needs the dict that get_state returned, not "
            f"{validation.shown(state)}"
        )
    if state.get("version") != _VERSION:
        raise ArgumentError(
            f"the state's version is {validation.shown(state.get('version'))}; this "
            f"mpidist reads version {_VERSION}"
        )
    # Neither missing nor additional keys: a later version would mean something else.
    keys = ("version", "epoch", "step", *names, *Origin._fields)
    if different := sorted(map(str, state.keys() ^ set(keys))):
        raise ArgumentError(
            f"a state has the integers {', '.join(keys)}; this one differs in "
            f"{', '.join(different)}"
        )
    numbers = {name: _require_integer(name, state[name]) for name in keys}
    for name in ("epoch", "step", *names):
        if not 0 <= numbers[name] < 1 << 63:
            raise ArgumentError(
                f"the state's {name} must be in 0..2**63-1, not {numbers[name]}"
            )
    return numbers


def _require_integer(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(
            f"the state's {name} must be an integer, not {value!r}"
        ) from None


def _differences(
    saved: Origin, current: Origin, pipeline: MapDataset | IterDataset
) -> list[str]:
    if saved.replicas != current.replicas:
        return [
            f"its batches are {_division(saved)}, but here they are "
            f"{_division(current)}; only states of "
            "Strategy.experimental_distribute_dataset with AutoShardPolicy.AUTO or "
            "DATA fit any number of replicas"
        ]
    differences = []
    if saved.batch_size != current.batch_size:
        differences.append(
            f"its batch_size is {saved.batch_size}, but here it is {current.batch_size}"
        )
        if current.replicas == _EACH_READS_ALL:
            differences[-1] += (
                " (AutoShardPolicy.OFF divides it by the number of replicas)"
            )
    if saved.cardinality != current.cardinality:
        differences.append(
            f"it has {saved.cardinality} steps per epoch, but here there are "
            f"{current.cardinality}"
        )
    if saved.source != current.source:
        differences.append(
            f"its rows are not those of {_cut(pipeline.describe_source())}"
        )
    if saved.dataset != current.dataset and not differences:
        differences.append(f"its steps are not those of {_cut(pipeline.describe())}")
    return differences


def _division(origin: Origin) -> str:
    if origin.replicas == _EACH_READS_ALL:
        return "read whole by each replica (AutoShardPolicy.OFF)"
    if origin.replicas == 0:
        return "divided over any number of replicas"
    count = f"{origin.replicas} replica{'s' if origin.replicas > 1 else ''}"
    return f"of {count}, each with data of its own"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."


class DatasetIterator:
    """An iterator over a dataset in this process, which can be saved and restored.

    After an error, `next` retries the same element if possible.

    Example:
      >>> dataset = mpidist.Dataset.range(6).shuffle().batch(2)
      >>> iterator = iter(dataset)
      >>> first = next(iterator)
      >>> state = iterator.get_state()  # integers, to be saved with the model
      >>> rest = np.concatenate(list(iterator))
      >>> iterator.set_state(state)
      >>> bool((np.concatenate(list(iterator)) == rest).all())
      True
    """

    def __init__(
        self, pipeline: MapDataset | IterDataset, epochs: EpochCounter, ahead: int
    ):
        self._pipeline = pipeline
        self._epochs = epochs
        self._ahead = ahead
        # Hashed only when a state is asked for: describing may open files.
        self._origin: Origin | None = None
        self._failure: str | None = None
        self._elements: Iterator[Any] = iter(())
        # The epoch is drawn now, so that two iterators get different ones.
        self._start(epochs.next_epoch())

    def __repr__(self) -> str:
        def describe() -> str:
            return f"element {self._step:,}, epoch {self._epoch.number}"

        return one_line(self, describe)

    def __iter__(self) -> DatasetIterator:
        return self

    def __next__(self) -> Any:
        """Return the next element.

        Raises:
          StopIteration: after the last element.
          DataError: a generator failed before and cannot continue.
          What a mapped function or a generator raises.
        """
        if self._failure is not None:
            raise DataError(self._failure)
        try:
            element = next(self._elements)
        except StopIteration:
            self.close()
            raise
        except BaseException as error:  # an interrupt must not lose elements either
            hide_internal_frames(error)
            self._recover(error)
            raise
        # Only elements that were returned count: prefetched ones come again after a
        # restart.
        self._step += 1
        return element

    @property
    def element_spec(self) -> Any:
        """A nest of `TensorSpec` like the elements; see `Dataset.element_spec`."""
        return self._pipeline.element_spec()

    def get_next(self) -> Any:
        """Return the next element, like `next`.

        Raises:
          OutOfRangeError: after the last element.
          What `next` raises.
        """
        element = self.get_next_as_optional()
        if not element.has_value():
            raise OutOfRangeError(f"the dataset has ended after {self._step} elements")
        return element.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return the next element as an `Optional`, empty after the last one."""
        for element in self:
            # One iteration: the end of the iterator is not an exception here.
            return Optional(element)
        return Optional()

    def get_state(self) -> dict[str, int]:
        """Return the position of this iterator: a few integers, each below 2**63.

        They are the epoch, the number of its elements that `next` has returned, the
        seeds of shuffles without one, and hashes that identify the dataset. Prefetched
        elements do not count.
        """
        return make_state(self._require_origin(), self._epoch, self._step)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue where `get_state` of an iterator over an equal dataset was called.

        The dataset's next iteration is the epoch after the state's. Datasets are
        equal if their transformations, numbers of rows and file names (without folders)
        are equal; functions and the contents of arrays are not compared. Seeking is
        O(1), except that a generator must yield the earlier elements again.

        Raises, without changing the iterator:
          ArgumentTypeError: `state` is not a dict of integers.
          ArgumentError: the state is of another dataset; the message says what differs.
        Raises, and must be called again before `next`:
          DataError: a generator yields too few elements.
          What a mapped function or a generator raises.
        """
        epoch, step = read_state(
            state, self._require_origin(), self._pipeline, self._epoch
        )
        # A prefetching thread must have ended before its dataset starts again.
        self.close()
        self._start(epoch, step)
        if isinstance(self._pipeline, IterDataset):
            self._skip(step)
        self._epochs.resume_after(epoch)

    def close(self) -> None:
        """End the iteration and the prefetching thread."""
        # Replaced first: whatever close raises, the iterator is at its end.
        elements, self._elements = self._elements, iter(())
        if isinstance(elements, Generator):
            elements.close()

    def _start(self, epoch: Epoch, step: int = 0) -> None:
        """Start before `step`; an iterable dataset starts before its first step."""
        self._epoch = epoch
        self._step = step
        self._failure = None
        if isinstance(self._pipeline, IterDataset):
            elements = self._pipeline.iterate(epoch)
        else:
            elements = MapToIterDataset(self._pipeline).iterate(epoch, step)
        self._elements = read_ahead(elements, self._ahead) if self._ahead else elements

    def _skip(self, steps: int) -> None:
        try:
            passed = sum(1 for _ in itertools.islice(self._elements, steps))
            if passed < steps:
                raise DataError(
                    f"the state is after {steps} elements, but the dataset has ended "
                    f"after {passed}"
                )
        except BaseException as error:
            self._recover(error)
            raise

    def _recover(self, error: BaseException) -> None:
        self.close()
        # A generator is exhausted by its own exception; an index can be read again.
        if isinstance(self._pipeline, IterDataset):
            self._failure = (
                f"element {self._step} of a generator's dataset failed ({error!r}), "
                "and a generator cannot continue after an error; iterate over the "
                "dataset again"
            )
        else:
            self._start(self._epoch, self._step)

    def _require_origin(self) -> Origin:
        if self._origin is None:
            self._origin = Origin.of(self._pipeline)
        return self._origin


def transform(
    pipeline: MapDataset | IterDataset, step: Callable[..., Any], *arguments: Any
) -> MapDataset | IterDataset:
    """Return a transformation of a dataset; `step` is that of a map-style one."""
    if isinstance(pipeline, IterDataset):
        if step is caching.Cache:
            return caching.IterCache(pipeline)
        return IterStep(step(pipeline, *arguments))
    transformed: MapDataset = step(pipeline, *arguments)
    return transformed


def is_sharded(steps: MapDataset | IterDataset) -> bool:
    """Return whether one of the transformations is a shard."""
    return any(isinstance(step, ordering.Shard) for step in walk(steps))


# User functions that these modules call may iterate over datasets: those of
# from_generator, distribute_datasets_from_function and Strategy.run
_CALLERS = ("mpidist.data.", "mpidist.strategy.")

_has_warned = False


def warn_undistributed() -> None:
    """Warn once per job that all ranks read all rows.

    Rank 1 warns, since rank 0 may iterate alone on purpose, for example to evaluate.
    Called by a function that the user's code calls through one other function.
    """
    global _has_warned
    MPI = sys.modules.get("mpi4py.MPI")  # noqa: N806  # commands run without MPI, too
    if _has_warned or MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    if MPI.COMM_WORLD.Get_rank() != 1 or _is_called_by_library(sys._getframe(3)):
        return
    _has_warned = True
    warn(
        "a dataset is iterated over without being distributed: each of the "
        f"{MPI.COMM_WORLD.Get_size()} ranks of this job reads all of its rows, and "
        "a shuffle without a seed differs between ranks. Divide it with "
        "strategy.experimental_distribute_dataset(dataset); if each rank should read "
        "everything, use dataset.with_options(mpidist.Options("
        "mpidist.AutoShardPolicy.OFF)). (Only rank 1 warns, once)",
        stacklevel=4,
    )


def _is_called_by_library(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_CALLERS):
            return True
        frame = frame.f_back
    return False


def to_iter_dataset(pipeline: MapDataset | IterDataset) -> IterDataset:
    """Return an iterable dataset of the elements of `pipeline`."""
    return pipeline if isinstance(pipeline, IterDataset) else MapToIterDataset(pipeline)


def concatenate(
    first: MapDataset | IterDataset, second: MapDataset | IterDataset
) -> MapDataset | IterDataset:
    """Return a dataset of the elements of `first`, then those of `second`."""
    if isinstance(first, MapDataset) and isinstance(second, MapDataset):
        return ordering.Concatenate(first, second)
    return ordering.IterConcatenate(to_iter_dataset(first), to_iter_dataset(second))


def zip_together(
    components: Sequence[MapDataset | IterDataset], spec: nest.Spec
) -> MapDataset | IterDataset:
    """Return a dataset of structures whose leaves are elements of `components`."""
    map_datasets = [c for c in components if isinstance(c, MapDataset)]
    if len(map_datasets) == len(components):
        return combining.Zip(map_datasets, spec)
    parents: list[Any] = list(map(to_iter_dataset, components))
    return IterStep(combining.Zip(parents, spec))


def unbatch(pipeline: MapDataset | IterDataset) -> MapDataset | IterDataset:
    """Return a dataset of the rows of the elements."""
    rows = pipeline.unbatched() if isinstance(pipeline, MapDataset) else None
    return rows or batching.Unbatch(to_iter_dataset(pipeline))


class Optional:
    """A batch or none, returned by `DistributedIterator.get_next_as_optional`.

    `from_value` and `empty` create one. Its methods do not communicate.

    Example:
      >>> rows = mpidist.Dataset.range(4).batch(4)
      >>> iterator = iter(strategy.experimental_distribute_dataset(rows))
      >>> batch = iterator.get_next_as_optional()
      >>> while batch.has_value():
      ...     print(strategy.gather(batch.get_value(), axis=0))
      ...     batch = iterator.get_next_as_optional()
      [0 1 2 3]
      >>> batch.element_spec, mpidist.Optional.from_value(3).get_value()
      (TensorSpec(shape=(None,), dtype=int64), 3)
    """

    # The iterator with the element_spec, which the value alone does not show
    _spec_of: DistributedIterator | None = None
    _spec: Any = None

    def __init__(self, *values: Any):
        self._values = values

    @staticmethod
    def empty(element_spec: Any) -> Optional:
        """Return an Optional without a value.

        Args:
          element_spec: a nest of `TensorSpec` for the missing value.

        Raises:
          ArgumentTypeError: a leaf is not a TensorSpec.
        """
        for leaf in nest.flatten(element_spec)[0]:
            validation.instance("element_spec", leaf, TensorSpec)
        optional = Optional()
        optional._spec = element_spec
        return optional

    @staticmethod
    def from_value(value: Any) -> Optional:
        """Return an Optional of a value: an array, a number, or a nest of them."""
        return Optional(value)

    @property
    def element_spec(self) -> Any:
        """A nest of `TensorSpec` like the value, even if there is no value.

        For a distributed iterator it is `DistributedIterator.element_spec`.
        """
        if self._spec_of is not None:
            return self._spec_of.element_spec
        if not self._values:
            return self._spec
        return spec_of(values.select_replica(self._values[0]), is_batch=False)

    def has_value(self, name: str | None = None) -> bool:
        """Return whether there is a batch; the same on all replicas."""
        return bool(self._values)

    def get_value(self, name: str | None = None) -> Any:
        """Return the batch.

        Raises:
          ArgumentError: there is no batch.
        """
        if not self._values:
            raise ArgumentError("the Optional has no value; check has_value() first")
        return self._values[0]

    def __repr__(self) -> str:
        return f"Optional({', '.join(map(repr, self._values))})"
