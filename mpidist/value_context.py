"""What a function that makes one value per replica is told."""

from __future__ import annotations

import dataclasses

__all__ = ["ValueContext"]


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """What a function of `experimental_distribute_values_from_function` is told.

    Example:
      >>> def shape(context):
      ...     return (context.replica_id_in_sync_group, context.num_replicas_in_sync)
      >>> value = strategy.experimental_distribute_values_from_function(shape)
      >>> strategy.experimental_local_results(value)  # on replica 0
      ((0, 2),)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
