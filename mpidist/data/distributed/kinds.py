"""What replicas tell each other of their batches where nobody knows them beforehand."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpidist import nest
from mpidist.agreement.calls import Call, group_by_rank
from mpidist.data.distributed.feed import Portion
from mpidist.errors import MismatchError

__all__ = ["Kind", "global_call", "require_equal", "show"]


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

    def load(self) -> Any:
        """Return arrays of no rows."""
        return None if self.pickled is None else pickle.loads(self.pickled)


def show(kind: Any) -> Kind:
    """Return what arrays of no rows look like, and those themselves if possible."""
    leaves, spec = nest.flatten(kind)
    text = f"{spec} of {[f'{a.dtype.name} {a.ndim} dimensions' for a in leaves]}"
    try:
        return Kind(text, pickle.dumps(kind))
    except (pickle.PicklingError, AttributeError, TypeError):  # say, a local class
        return Kind(text, None)


def require_equal(operation: str, name: str, things: Sequence[Any]) -> None:
    """Raise, on all ranks, if what the ranks told of themselves differs."""
    if len(set(things) - {"missing"}) > 1:
        raise MismatchError(
            f"{operation}: the replicas differ: {name} is "
            f"{group_by_rank(list(map(str, things)))}"
        )
