"""StrategyV1: the methods of TensorFlow 1's strategies, on top of Strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from mpidist import checks
from mpidist.context import require_cross_replica
from mpidist.data.dataset import Dataset, DatasetLike
from mpidist.data.distributed.datasets import InputContext
from mpidist.data.distributed.iterator_v1 import (
    InputIterator,
    from_dataset,
    from_input_fn,
)
from mpidist.errors import ArgumentTypeError, ContextError
from mpidist.input_options import InputReplicationMode
from mpidist.strategy import Strategy

__all__ = ["StrategyV1"]

M = TypeVar("M", bound=Mapping[str, Any])


class StrategyV1(Strategy):
    """A strategy with TensorFlow 1's methods too.

    They are collective, but for `experimental_make_numpy_dataset`,
    `experimental_initialize` and `update_config_proto`.

    Example:
      >>> strategy.experimental_run(lambda: np.ones(2)).values
      (array([1., 1.]),)
      >>> config = strategy.update_config_proto({"job": "train"})
      >>> config["job"], config["num_replicas"]
      ('train', 2)
    """

    def make_dataset_iterator(self, dataset: DatasetLike) -> InputIterator:
        """Return an iterator over `dataset`, each batch divided over the replicas.

        Collective, and so is each `get_next` of the result.

        Args:
          dataset: batched by the GLOBAL batch size, which the number of replicas
            divides.

        Raises, on all replicas:
          ArgumentError: a batch cannot be divided evenly: use make_input_fn_iterator.
        """
        require_cross_replica(self, "make_dataset_iterator")
        return from_dataset(self.extended, dataset)

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over what `input_fn(InputContext)` makes on each replica.

        Collective, and so is each `get_next` of the result.

        Args:
          input_fn: returns a dataset, or a function without arguments that returns the
            next batch at each call. Batches are taken whole.
          replication_mode: PER_WORKER.

        Raises, on all replicas:
          ArgumentError: another mode; `input_fn` returned something else.
        """
        require_cross_replica(self, "make_input_fn_iterator")
        return from_input_fn(self.extended, input_fn, replication_mode)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: InputIterator | None = None
    ) -> Any:
        """Run `fn` on every replica, with the iterator's next value if there is one.

        Collective. Returns and raises what `run` does, and raises what the iterator's
        `get_next` does, on all replicas.
        """
        require_cross_replica(self, "experimental_run")
        if input_iterator is None:
            return self.run(fn)
        self.extended.agreement.prepare(
            "experimental_run",
            lambda: checks.instance("input_iterator", input_iterator, InputIterator),
        )
        return self.run(fn, (input_iterator.get_next(),))

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Dataset:
        """Return a dataset of the rows of arrays: `Dataset.from_tensor_slices`.

        Not collective. `numpy_input` is a nest of arrays `(rows, *shape)`.
        """
        return Dataset.from_tensor_slices(numpy_input)

    def experimental_initialize(self) -> list[Any]:
        """Return what was initialized, which is []: the constructor did it all."""
        self.extended.topology.require_open()
        return []

    def update_config_proto(self, config_proto: M) -> M:
        """Return a copy of a configuration with what this strategy's launch needs.

        Not collective.

        Args:
          config_proto: a mapping, which is not changed.

        Returns:
          A deep copy with the keys `num_replicas`, `replica_id`, `device` and
          `transport`.

        Raises:
          ArgumentTypeError: it is no mapping.
        """
        if not isinstance(config_proto, Mapping):
            raise ArgumentTypeError(
                f"config_proto must be a mapping, not {checks.shown(config_proto)}"
            )
        updated: Any = copy.deepcopy(config_proto)
        extended = self.extended
        updated["num_replicas"] = extended.num_replicas
        updated["replica_id"] = extended.replica_id
        updated["device"] = extended.device
        updated["transport"] = extended.collectives.transport.name
        return updated  # type: ignore[no-any-return]

    def __copy__(self) -> NoReturn:
        raise ContextError(
            f"a {type(self).__name__} cannot be copied shallowly: both would share one "
            "communicator; use copy.deepcopy, which is collective"
        )
