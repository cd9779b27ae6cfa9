"""StrategyV1: the methods of TensorFlow 1's strategies, on top of Strategy."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar

from mpidist.context import enter, require_cross_replica
from mpidist.data.dataset import Dataset, DatasetLike, as_dataset
from mpidist.data.distributed.datasets import DistributedDataset, InputContext
from mpidist.data.distributed.iterator import DistributedIterator
from mpidist.data.iter_dataset import GeneratorDataset
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    UnsupportedError,
)
from mpidist.options import InputOptions, InputReplicationMode
from mpidist.strategy.extended import MultiStepContext, StrategyExtended
from mpidist.strategy.strategy import Strategy
from mpidist.util import nest, validation
from mpidist.util.representation import one_line
from mpidist.util.tracebacks import hide_internal_frames

M = TypeVar("M", bound=Mapping[str, Any])


class StrategyExtendedV1(StrategyExtended):
    """StrategyExtended with TensorFlow 1's methods."""

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs the program for its own replicas: always."""
        return True

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes its own state: always."""
        return True

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Dataset:
        """Return a dataset of the rows of arrays: `Dataset.from_tensor_slices`.

        Not collective.

        Args:
          numpy_input: a nest of arrays `(rows, *shape)`.
          session: accepted for TensorFlow compatibility.

        Raises, on this rank only:
          ContextError: called in replica context or under another strategy.
          ArgumentError: unequal numbers of rows, or a scalar.
        """
        require_cross_replica(self.strategy, "experimental_make_numpy_dataset")
        return Dataset.from_tensor_slices(numpy_input)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: Any = None,
    ) -> Any:
        """Call `fn(context, inputs)` for several batches; return the context.

        Args:
          fn: takes a `MultiStepContext` and the next value of `iterator`; it is called
            in cross-replica context.
          iterator: an object with `get_next()`, such as a distributed iterator.
          iterations: how many steps; 0 takes none.
          initial_loop_values: initial outputs, by name.
        """
        call = "experimental_run_steps_on_iterator"
        require_cross_replica(self.strategy, call)

        def prepare() -> MultiStepContext:
            validation.function("fn", fn)
            validation.function(
                "iterator.get_next", getattr(iterator, "get_next", None)
            )
            validation.integer("iterations", iterations, 0)
            return MultiStepContext(initial_loop_values)

        context = self.consensus.run(call, prepare)
        with enter(self.strategy):
            for _ in range(iterations):
                fn(context, iterator.get_next())
        return context


class StrategyV1(Strategy):
    """A strategy with TensorFlow 1's methods too.

    They are collective, except `experimental_make_numpy_dataset`, `group`,
    `colocate_vars_with`, `configure`, `experimental_initialize` and
    `update_config_proto`.

    Example:
      >>> strategy.experimental_run(lambda: np.ones(2)).values
      (array([1., 1.]),)
      >>> config = strategy.update_config_proto({"job": "train"})
      >>> config["job"], config["num_replicas"]
      ('train', 2)
    """

    _extended: StrategyExtendedV1

    @property
    def extended(self) -> StrategyExtendedV1:
        """Further methods, for libraries built on a strategy."""
        return self._extended

    def make_dataset_iterator(self, dataset: DatasetLike) -> InputIterator:
        """Return an iterator over `dataset`, each batch divided over the replicas.

        Collective, and so is each `get_next` of the result.

        Args:
          dataset: batched by the GLOBAL batch size, which the number of replicas
            divides.

        Raises, on all replicas:
          ArgumentError: a batch cannot be divided evenly: use make_input_fn_iterator;
            or the dataset is not batched.
          What `experimental_distribute_dataset` raises.
        """
        call, replicas = "make_dataset_iterator", self.num_replicas_in_sync
        require_cross_replica(self, call)

        def check() -> None:
            size = as_dataset(dataset, call).pipeline.batch_size
            if size is not None and size % replicas:
                raise ArgumentError(
                    f"{call}: batches of {size} rows cannot be divided into equal "
                    f"parts for {replicas} replicas; use another batch size, or "
                    "make_input_fn_iterator, which does not divide batches"
                )

        self._extended.consensus.run(call, check)
        return InputIterator(
            DistributedDataset.of_global_batches(self._extended, dataset, None, call)
        )

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the batches of `input_fn(InputContext)`.

        Collective, and so is each `get_next` of the result.

        Args:
          input_fn: returns this replica's dataset, or an iterable of batches, or a
            function without arguments that returns the next batch, or scalar (the same
            number on all replicas), until it raises StopIteration or OutOfRangeError.
            Batches are not divided. A replay calls `input_fn` again if it returned a
            function.
          replication_mode: PER_WORKER.

        Raises, on all replicas:
          ArgumentError: another mode; an invalid result of `input_fn`.
          What `input_fn` raises on any replica.
        """
        call, extended = "make_input_fn_iterator", self._extended
        require_cross_replica(self, call)
        replicas = extended.num_replicas
        where = InputContext(replicas, extended.replica_id, replicas)

        def make() -> tuple[Dataset, InputOptions]:
            if replication_mode is not InputReplicationMode.PER_WORKER:
                raise ArgumentError(
                    f"replication_mode must be InputReplicationMode.PER_WORKER, not "
                    f"{validation.shown(replication_mode)}"
                )
            return _make(input_fn, where, call)

        dataset, options = extended.consensus.run(call, make)
        return InputIterator(
            DistributedDataset.from_function(extended, lambda _: dataset, options, call)
        )

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: InputIterator | None = None
    ) -> Any:
        """Run `fn` on every replica, with the iterator's next value if there is one.

        Collective. Returns what `run` returns. Raises, on all replicas, what `run` and
        the iterator's `get_next` raise.
        """
        require_cross_replica(self, "experimental_run")
        try:
            if input_iterator is None:
                return self.run(fn)
            if not isinstance(input_iterator, InputIterator):
                name = "input_iterator"
                with self._extended.consensus.call("experimental_run") as call:
                    # It raises, on all ranks
                    call.reserve(
                        validation.instance, name, input_iterator, InputIterator
                    )
            return self.run(fn, (input_iterator.get_next(),))
        except BaseException as error:
            hide_internal_frames(error)
            raise

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Dataset:
        """Return a dataset of the rows of arrays, like `Dataset.from_tensor_slices`.

        Not collective.
        """
        return self._extended.experimental_make_numpy_dataset(numpy_input, session)

    def group(self, value: Any, name: str | None = None) -> Any:
        """Return this replica's component if `value` is a single value, else None.

        In TensorFlow's graphs it groups operations. Here all values are computed
        already. Not collective.

        Args:
          value: a value, a distributed value, or a nest of them.
          name: if given, the result is None, as in TensorFlow.
        """
        leaves, _ = nest.flatten(self.experimental_local_results(value))
        return leaves[0] if len(leaves) == 1 and name is None else None

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> AbstractContextManager[None]:
        """Return a context manager that only checks the variable. Not collective."""
        return self._extended.colocate_vars_with(colocate_with_variable)

    def configure(
        self,
        session_config: MutableMapping[str, Any] | None = None,
        cluster_spec: Any = None,
        task_type: Any = None,
        task_id: Any = None,
    ) -> None:
        """Do in place what `update_config_proto` does in a copy of a configuration.

        Not collective.

        Args:
          session_config: a mutable mapping; None does nothing.
          cluster_spec: None, since MPI's launcher defines the cluster.
          task_type: None, likewise.
          task_id: None, likewise.

        Raises:
          ArgumentTypeError: `session_config` is not a mutable mapping.
          UnsupportedError: a cluster or a task was given.
        """
        cluster = {"cluster_spec": cluster_spec, "task_type": task_type}
        for name, value in {**cluster, "task_id": task_id}.items():
            if value is not None:
                raise UnsupportedError(
                    f"configure: {name} must be None, not {validation.shown(value)}: "
                    "mpirun or srun has started the ranks, which are the cluster"
                )
        if session_config is None:
            return
        if not isinstance(session_config, MutableMapping):
            raise ArgumentTypeError(
                "session_config must be a mutable mapping, not "
                f"{validation.shown(session_config)}"
            )
        session_config.update(self.update_config_proto(session_config))

    def experimental_initialize(self) -> list[Any]:
        """Return []: the constructor has initialized everything."""
        self._extended.topology.require_open()
        return []

    def update_config_proto(self, config_proto: M) -> M:
        """Return a copy of a configuration with this strategy's launch parameters.

        Not collective.

        Args:
          config_proto: a mapping, which is not changed.

        Returns:
          A deep copy with the keys `num_replicas`, `replica_id`, `device` and
          `transport`.

        Raises:
          ArgumentTypeError: `config_proto` is not a mapping.
        """
        if not isinstance(config_proto, Mapping):
            raise ArgumentTypeError(
                f"config_proto must be a mapping, not {validation.shown(config_proto)}"
            )
        updated: Any = copy.deepcopy(config_proto)
        extended = self._extended
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


class InputIterator:
    """An iterator over a distributed dataset that can start again.

    Made by `Strategy.make_dataset_iterator` and `Strategy.make_input_fn_iterator`.

    Example:
      >>> rows = mpidist.Dataset.range(4).batch(4)
      >>> iterator = strategy.make_dataset_iterator(rows)
      >>> doubled = strategy.experimental_run(lambda x: 2 * x, iterator)
      >>> strategy.gather(doubled, axis=0)
      array([0, 2, 4, 6])
      >>> iterator.initialize()  # from the start
      []
    """

    def __init__(self, dataset: DistributedDataset):
        self._dataset = dataset
        self._iterator: DistributedIterator | None = None

    def __repr__(self) -> str:
        return one_line(self, lambda: f"of {self._iterator or self._dataset!r}")

    def initialize(self) -> list[Any]:
        """Restart from the first batch, in the next epoch's order. Returns [].

        Every replica must call it; otherwise the next `get_next` raises.
        """
        self.close()
        self._iterator = iter(self._dataset)
        return []

    def get_next(self) -> Any:
        """Return this step's batch of all replicas, a nest of `PerReplica`. Collective.

        Initialises the iterator if necessary.

        Raises, on all replicas:
          OutOfRangeError: after the last step.
          What `DistributedIterator.get_next` raises.
        """
        try:
            return self._require_iterator().get_next()
        except BaseException as error:
            hide_internal_frames(error)
            raise

    def get_state(self) -> dict[str, int]:
        """Return the position of this iterator; see `DistributedIterator.get_state`.

        Not collective. Initialises the iterator if necessary.
        """
        return self._require_iterator().get_state()

    def set_state(self, state: Mapping[str, int]) -> None:
        """Resume from a state; see `DistributedIterator.set_state`. Collective.

        `initialize` then starts the epoch after the state's.
        """
        self._require_iterator().set_state(state)

    def close(self) -> None:
        """Stop the prefetch thread. Not collective."""
        if self._iterator is not None:
            self._iterator.close()

    def _require_iterator(self) -> DistributedIterator:
        if self._iterator is None:
            self.initialize()
        assert self._iterator is not None
        return self._iterator


def _make(
    input_fn: Callable[[InputContext], Any], where: InputContext, call: str
) -> tuple[Dataset, InputOptions]:
    made = validation.function("input_fn", input_fn)(where)
    if callable(made) and not inspect.isgeneratorfunction(made):
        batches = _Calls(input_fn, where, made)
        # Called on demand only
        options = InputOptions(experimental_per_replica_buffer_size=0)
        return Dataset(
            GeneratorDataset(batches, is_batched=True, may_be_scalars=True)
        ), options
    try:
        return as_dataset(made, call), InputOptions()
    except ArgumentTypeError as error:
        raise ArgumentError(
            f"{call}: input_fn must return a mpidist.Dataset or a function that "
            f"returns the next batch, not {made!r}"
        ) from error


class _Calls:
    """A re-iterable over the batches that a function returns one by one."""

    def __init__(
        self,
        input_fn: Callable[[InputContext], Any],
        where: InputContext,
        first: Callable[[], Any],
    ):
        self._input_fn = input_fn
        self._where = where
        self._first: Callable[[], Any] | None = first

    def __iter__(self) -> Iterator[Any]:
        next_batch, self._first = self._first or self._input_fn(self._where), None
        while True:
            try:
                batch = next_batch()
            except StopIteration:
                return
            yield batch
