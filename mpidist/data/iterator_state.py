"""The state of an iterator: a few integers, to be saved and restored.

Nothing here communicates. A state is a dict of

- `version`: of this format;
- `epoch`, `step`: number of epochs before this one, and of its batches (or single
  elements) that were returned;
- `entropy`: seed of shuffles without a seed of their own, 0 if there are none;
- the fields of `Origin`, which identify the dataset.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpidist.data.iter_dataset import IterDataset
from mpidist.data.map_dataset import Epoch, MapDataset
from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.util import validation
from mpidist.util.hashing import hash62

__all__ = ["Origin", "EpochCounter", "make_state", "read_state"]

_VERSION = 1
_SHOWN = 400
# Of datasets that OFF lets each replica read whole.
_EACH_READS_ALL = -1


class EpochCounter:
    """The next epoch of a dataset, shared by all of its iterators."""

    def __init__(self, entropy: int):
        self._next = Epoch(0, entropy)

    def next_epoch(self) -> Epoch:
        """Return the next epoch, and advance."""
        # The counter is common to all iterators of a dataset: each starts a new epoch.
        epoch = self._next
        self._next = Epoch(epoch.number + 1, epoch.entropy)
        return epoch

    def resume_after(self, epoch: Epoch) -> None:
        """Make the epoch after `epoch` the next one."""
        # By way of next_epoch, so that the entropy of the state is kept as well.
        self._next = epoch
        self.next_epoch()


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
            # A step is one batch of each replica.
            sum(o.batch_size for o in origins),
            cardinality,
            hash62(repr([o.source for o in origins])),
            hash62(repr([o.dataset for o in origins])),
        )


_KEYS = ("version", "epoch", "step", "entropy", *Origin._fields)


def make_state(origin: Origin, epoch: Epoch, step: int) -> dict[str, int]:
    """Return the state before a step of an epoch."""
    numbers = (_VERSION, epoch.number, step, epoch.entropy, *origin)
    return dict(zip(_KEYS, numbers, strict=True))


def read_state(
    state: Any, origin: Origin, pipeline: MapDataset | IterDataset
) -> tuple[Epoch, int]:
    """Return the epoch and the step of a state.

    Args:
      state: returned by `make_state`.
      origin: expected origin of the state.
      pipeline: the dataset that is read here, for messages.

    Raises:
      ArgumentTypeError: `state` is not a dict of integers.
      ArgumentError: it is of another dataset or version, or damaged.
    """
    numbers = _require_integers(state)
    theirs = Origin(*(numbers[name] for name in Origin._fields))
    if differences := _differences(theirs, origin, pipeline):
        raise ArgumentError(
            f"the state is of another dataset: {'; '.join(differences)}"
        )
    step = numbers["step"]
    # A negative cardinality stands for endless or unknown: no upper limit then.
    if 0 <= origin.cardinality < step:
        raise ArgumentError(
            f"the state is at step {step}, but an epoch has {origin.cardinality} steps"
        )
    return Epoch(numbers["epoch"], numbers["entropy"]), step


def _require_integers(state: Any) -> dict[str, int]:
    """Return the integers of a state; raise if they are not valid."""
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
    if different := sorted(map(str, state.keys() ^ set(_KEYS))):
        raise ArgumentError(
            f"a state has the integers {', '.join(_KEYS)}; this one differs in "
            f"{', '.join(different)}"
        )
    numbers = {name: _require_integer(name, state[name]) for name in _KEYS}
    # The other numbers are only compared, so any integer will do.
    for name in ("epoch", "step", "entropy"):
        if not 0 <= numbers[name] < 1 << 63:
            raise ArgumentError(
                f"the state's {name} must be in 0..2**63-1, not {numbers[name]}"
            )
    return numbers


def _require_integer(name: str, value: Any) -> int:
    try:
        # NumPy's integers are fine, floats are not.
        return operator.index(value)
    except TypeError:
        raise ArgumentTypeError(
            f"the state's {name} must be an integer, not {value!r}"
        ) from None


def _differences(
    theirs: Origin, ours: Origin, pipeline: MapDataset | IterDataset
) -> list[str]:
    """Describe the differences, in words; empty if there are none."""
    if theirs.replicas != ours.replicas:
        return [
            f"its batches are {_division(theirs)}, but here they are "
            f"{_division(ours)}; only states of "
            "Strategy.experimental_distribute_dataset with AutoShardPolicy.AUTO or "
            "DATA fit any number of replicas"
        ]
    differences = []
    if theirs.batch_size != ours.batch_size:
        differences.append(
            f"its batch_size is {theirs.batch_size}, but here it is {ours.batch_size}"
        )
        if ours.replicas == _EACH_READS_ALL:
            differences[-1] += (
                " (AutoShardPolicy.OFF divides it by the number of replicas)"
            )
    if theirs.cardinality != ours.cardinality:
        differences.append(
            f"it has {theirs.cardinality} steps per epoch, but here there are "
            f"{ours.cardinality}"
        )
    if theirs.source != ours.source:
        differences.append(
            f"its rows are not those of {_cut(pipeline.describe_source())}"
        )
    if theirs.dataset != ours.dataset and not differences:
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
