"""Iteration over a dataset in one process. Nothing here communicates."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from mpidist.data import batching, caching, combining, ordering
from mpidist.data.iter_dataset import IterDataset, MapToIterDataset
from mpidist.data.iterator_state import EpochCounter, Origin, make_state, read_state
from mpidist.data.map_dataset import Epoch, MapDataset
from mpidist.data.optional import Optional
from mpidist.errors import DataError, OutOfRangeError
from mpidist.util import nest
from mpidist.util.notices import warn
from mpidist.util.representation import one_line
from mpidist.util.threads import read_ahead
from mpidist.util.tracebacks import fold

__all__ = [
    "DatasetIterator",
    "TransformationClasses",
    "concatenate",
    "to_iter_dataset",
    "is_sharded",
    "transformations_for",
    "unbatch",
    "warn_undistributed",
    "zip_together",
]


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
            fold(error)
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
        seed of shuffles without one, and hashes that identify the dataset. Prefetched
        elements do not count.
        """
        return make_state(self._require_origin(), self._epoch, self._step)

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue where `get_state` of an iterator over an equal dataset was called.

        The dataset's next iteration is the epoch after that of the state. Datasets are
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
        epoch, step = read_state(state, self._require_origin(), self._pipeline)
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
        # Read ahead in a thread only if the dataset has `prefetch`.
        self._elements = read_ahead(elements, self._ahead) if self._ahead else elements

    def _skip(self, steps: int) -> None:
        """Skip the first elements of an iterable dataset."""
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
        """Prepare for another call after an error."""
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


class TransformationClasses(NamedTuple):
    """Constructors of transformations: called with the parent and the arguments."""

    map: Callable[..., Any]
    batch: Callable[..., Any]
    shuffle: Callable[..., Any]
    repeat: Callable[..., Any]
    window: Callable[..., Any]
    shard: Callable[..., Any]
    enumerate: Callable[..., Any]
    cache: Callable[..., Any]


_MAP_TRANSFORMATIONS = TransformationClasses(
    batching.Map,
    batching.Batch,
    ordering.Shuffle,
    ordering.Repeat,
    ordering.Window,
    ordering.Shard,
    combining.Enumerate,
    caching.Cache,
)
_ITER_TRANSFORMATIONS = TransformationClasses(
    batching.IterMap,
    batching.IterBatch,
    ordering.IterShuffle,
    ordering.IterRepeat,
    ordering.IterWindow,
    ordering.IterShard,
    combining.IterEnumerate,
    caching.IterCache,
)


def transformations_for(pipeline: MapDataset | IterDataset) -> TransformationClasses:
    """Return the transformations of the kind of dataset that `pipeline` is."""
    return (
        _ITER_TRANSFORMATIONS
        if isinstance(pipeline, IterDataset)
        else _MAP_TRANSFORMATIONS
    )


def is_sharded(steps: MapDataset | IterDataset) -> bool:
    """Return whether one of the transformations is a shard."""
    flags = [isinstance(steps, ordering.Shard | ordering.IterShard)]

    def look(parent: Any) -> Any:
        flags.append(is_sharded(parent))
        return parent

    steps.replace_parents(look)
    return any(flags)


# User functions that these modules call may iterate over datasets: those of
# from_generator, distribute_datasets_from_function and Strategy.run
_CALLERS = ("mpidist.data.", "mpidist.strategy.extended")

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
    return combining.IterZip(list(map(to_iter_dataset, components)), spec)


def unbatch(pipeline: MapDataset | IterDataset) -> MapDataset | IterDataset:
    """Return a dataset of the rows of the elements."""
    rows = pipeline.unbatched() if isinstance(pipeline, MapDataset) else None
    return rows or batching.Unbatch(to_iter_dataset(pipeline))
