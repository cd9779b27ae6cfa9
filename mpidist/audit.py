"""Find out whether mirrored variables are equal on all replicas."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from mpidist import arrays
from mpidist.agreement.calls import group_by_rank, name_ranks
from mpidist.errors import MismatchError
from mpidist.replica_group import ReplicaGroup

__all__ = ["audit_variables"]

_CALL = "audit_variables"


def audit_variables(group: ReplicaGroup) -> None:
    """Raise a MismatchError on all replicas if a variable differs. Collective."""
    mirrored = {i: v for i, v in group.variables.items() if not v.on_read}
    sums = {i: _checksum(variable.local) for i, variable in mirrored.items()}
    everyone = group.agreement.gather(_CALL, sums)
    # A variable may have been forgotten by some processes already
    for i in sorted(set.intersection(*map(set, everyone))):
        if len({sums[i] for sums in everyone}) > 1:
            _report(group, mirrored[i], [sums[i] for sums in everyone])


def _checksum(array: Any) -> int:
    return zlib.crc32(arrays.value_bytes(array).tobytes())


def _report(group: ReplicaGroup, variable: Any, sums: list[int]) -> None:
    differing = [rank for rank, checksum in enumerate(sums) if checksum != sums[0]]
    mine = np.ascontiguousarray(arrays.to_host(variable.local))
    first = arrays.to_host(group.broadcast_from_first(_CALL, variable.local))
    # Compare bytes, as the checksum did: nan equals nan, and 0.0 is not -0.0
    rows = [arrays.value_bytes(array) for array in (mine, first)]
    differs = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
    own = int(differs[0]) if differs.size else mine.size
    index = min(group.agreement.gather(_CALL, own))
    values = group.agreement.gather(_CALL, repr(mine.reshape(-1)[index]))
    place = tuple(int(i) for i in np.unravel_index(index, mine.shape))
    raise MismatchError(
        f"variable {variable.name} differs from replica 0's on "
        f"{name_ranks(differing)}, first in element {place}: {group_by_rank(values)}"
    )
