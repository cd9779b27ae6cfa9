"""StrategyExtended: further methods for libraries built on a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.public_calls import announce_errors
from mpidist.comm.consensus.signatures import group_by_rank, name_ranks
from mpidist.comm.cross_device_ops import CrossDeviceOps
from mpidist.comm.device_info import GpuRequest
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.context import enter, get_strategy, require_cross_replica
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, ContextError, MismatchError
from mpidist.options import CommunicationOptions
from mpidist.reductions import ReduceOp
from mpidist.strategy.variables import Variable
from mpidist.util import validation
from mpidist.util.representation import one_line
from mpidist.util.tracebacks import hide_internal_frames
from mpidist.values import (
    Mirrored,
    local_arguments,
    local_component,
    regroup,
    select_replica,
)

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

Arguments = tuple[Any, ...] | list[Any]


class StrategyExtended(ReplicaGroup):
    """Further methods of a strategy; the object is `strategy.extended`.

    Unless they say otherwise, its methods are collective and need cross-replica (or
    default) context.

    Example:
      >>> strategy.extended.worker_devices
      ('CPU:0',)
    """

    def __init__(
        self,
        strategy: Strategy,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communicator: MPI.Intracomm | None = None,
        gpu_request: GpuRequest | None = None,
    ):
        super().__init__(devices, cross_device_ops, communicator, gpu_request)
        self.strategy = strategy
        self._in_cross_replica = enter(strategy)
        self._in_update = enter(strategy, is_update=True)
        # Called on all ranks before each `run`
        self.before_run: Callable[[], None] | None = None

    def __repr__(self) -> str:
        def describe() -> str:
            return f"replica {self.replica_id} of {self.num_replicas} on {self.device}"

        return one_line(self, describe)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The device of this process's replica, as a one-tuple."""
        return (self.device,)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device on which this process keeps variables, as a one-tuple."""
        return (self.device,)

    @property
    def experimental_require_static_shapes(self) -> bool:
        """Whether shapes may not change from step to step: never required."""
        return False

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: true on rank 0."""
        return self.replica_id == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: true on rank 0."""
        return self.replica_id == 0

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `fn` in replica context on every replica; see `Strategy.run`.

        `args` other than a tuple or list are the only argument, as in
        `call_for_each_replica(fn, iterator.get_next())`.
        """
        if not isinstance(args, tuple | list):
            args = (args,)
        try:
            return self.strategy.run(fn, args, kwargs)
        except BaseException as error:
            hide_internal_frames(error)
            raise

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `merge_fn` in cross-replica context; see `ReplicaContext.merge_call`."""
        self.topology.require_open()
        merged = self.consensus.run("merge_call", self._merge, merge_fn, args, kwargs)
        return select_replica(merged)

    def _merge(
        self,
        merge_fn: Callable[..., Any],
        args: Arguments,
        kwargs: dict[str, Any] | None,
    ) -> Any:
        validation.function("merge_fn", merge_fn)
        args, kwargs = validation.call_arguments(args, kwargs)
        if not self.is_default:
            args = regroup(args, self.replica_id)
            kwargs = kwargs and regroup(kwargs, self.replica_id)
        with self._in_cross_replica:
            return merge_fn(self.strategy, *args, **kwargs)

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run `fn(var, *args, **kwargs)` on every replica's own copy of `var`.

        For a list or tuple of variables, `fn` is called once, with the list.

        Not collective. Assignments in `fn` change this replica's copy without
        communication, so `fn` must compute the same on every replica: pass it reduced
        values. Distributed values in `args` become this replica's component.

        Args:
          var: a variable of this strategy, or a mirrored value (read-only arrays); or
            a list or tuple of them.
          fn: called as `fn(var, *args, **kwargs)` in cross-replica context.
          args: a tuple or list, nested.
          kwargs: likewise.
          group: True returns None (TensorFlow's grouped op), False the result of `fn`.

        Raises ContextError in replica context (use `merge_call` there) and for a
        variable of another strategy, and ArgumentTypeError if `fn` is not a function.

        Example:
          >>> with strategy.scope():
          ...     w = mpidist.Variable(np.zeros(2))
          >>> strategy.extended.update(w, lambda w, x: w.assign_add(x), args=(1.0,))
          >>> w.numpy()
          array([1., 1.])
        """
        require_cross_replica(self.strategy, "update")
        target = self._own_copy(var)
        if not callable(fn):
            validation.function("fn", fn)
        args, kwargs = local_arguments(args, kwargs)
        with self._in_update:
            result = fn(target, *args, **kwargs)
        return None if group else result

    def _own_copy(self, var: Any) -> Any:
        if isinstance(var, Variable) and var._strategy is self.strategy:
            return var
        if isinstance(var, Mirrored):
            return var.values[0]
        if type(var) in (list, tuple):
            return type(var)(map(self._own_copy, var))
        raise ContextError(
            f"update: {validation.shown(var)} is not a variable of this strategy"
        )

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the reduction of `value` over all replicas, `Mirrored`.

        Args:
          reduce_op: SUM, MEAN, MIN, MAX or PRODUCT.
          value: a `PerReplica`, or an array as this rank's contribution.
          destinations: a device string, several, or a distributed value. The result is
            on every replica.
          options: see `CommunicationOptions`.

        Raises, on all replicas: see `CrossDeviceOps.reduce`.

        Example:
          >>> strategy.extended.reduce_to("SUM", np.ones(2), "CPU:0") / 2
          array([1., 1.])
        """
        self.topology.require_open()
        require_cross_replica(self.strategy, "reduce_to")
        ops = self.cross_device_ops
        return self._bare_if_default(
            ops.reduce(reduce_op, value, destinations, options)
        )

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Return the reductions of several values, which are sent packed together.

        Like `reduce_to` for each `(value, destinations)` of a list.

        Example:
          >>> pairs = [(np.ones(2), "CPU:0"), (np.ones(1), "CPU:0")]
          >>> [x / 2 for x in strategy.extended.batch_reduce_to("SUM", pairs)]
          [array([1., 1.]), array([1.])]
        """
        self.topology.require_open()
        require_cross_replica(self.strategy, "batch_reduce_to")
        ops = self.cross_device_ops
        results = ops.batch_reduce(reduce_op, value_destination_pairs, options)
        return [self._bare_if_default(result) for result in results]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return replica 0's `tensor`, `Mirrored`; see `CrossDeviceOps.broadcast`."""
        self.topology.require_open()
        require_cross_replica(self.strategy, "broadcast_to")
        return self._bare_if_default(
            self.cross_device_ops.broadcast(tensor, destinations)
        )

    def _bare_if_default(self, value: Any) -> Any:
        return local_component(value) if self.is_default else value

    def read_var(self, v: Any) -> Any:
        """Return the value of a variable; collective where `Variable.value` is."""
        return v.value() if isinstance(v, Variable) else local_component(v)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Return the devices for state outside variables. Not collective."""
        return self.parameter_devices

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Arguments = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Run `fn(*args, **kwargs)` once per replica, as `update` does; not collective.

        `colocate_with` is what `non_slot_devices` returned; the rest is as in `update`.
        """
        require_cross_replica(self.strategy, "update_non_slot")
        validation.function("fn", fn)
        args, kwargs = local_arguments(args, kwargs)
        with self._in_update:
            result = fn(*args, **kwargs)
        return None if group else result

    def audit_variables(self) -> None:
        """Raise if a mirrored variable is not equal on all replicas. Collective.

        Compares checksums of all bytes of each ON_WRITE variable. If they are equal,
        nothing else is communicated.

        Raises MismatchError, on all replicas: it names the first variable that differs,
        the replicas where it differs from replica 0's, and the first such element.

        Example:
          >>> with strategy.scope():
          ...     w = mpidist.Variable(np.zeros(2))
          >>> strategy.extended.audit_variables()
        """
        self.topology.require_open()
        call, consensus = "audit_variables", self.consensus
        mirrored = {i: v for i, v in self.variables.items() if not v.on_read}
        checksums = consensus.gather_objects(
            call, lambda: {i: arrays.checksum(v.local) for i, v in mirrored.items()}
        )
        # Some processes may have dropped a variable already
        for i in sorted(set.intersection(*map(set, checksums))):
            first = checksums[0][i]
            differing = [rank for rank, c in enumerate(checksums) if c[i] != first]
            if differing:
                element = _first_difference(self, call, mirrored[i].local)
                raise MismatchError(
                    f"variable {mirrored[i].name} differs from replica 0's on "
                    f"{name_ranks(differing)}, first in element {element}"
                )

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether `v` is a variable of this strategy. Not collective."""
        return isinstance(v, Variable) and v.distribute_strategy is self.strategy

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> AbstractContextManager[None]:
        """Return a context manager for creating variables on another variable's device.

        It only checks the variable: a replica has one device. Not collective. Raises
        ArgumentError if `colocate_with_variable` is not a variable of this strategy.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ArgumentError(
                "colocate_vars_with needs a variable that was created under this "
                f"strategy, not {validation.shown(colocate_with_variable)}"
            )
        return nullcontext()

    def value_container(self, value: Any) -> Any:
        """Return the container of `value`, which is itself. Not collective."""
        return value

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Return the reduction over all replicas: `ReplicaContext.all_reduce`."""
        return self.reduce("all_reduce", reduce_op, value, options)

    def all_gather(
        self, value: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the replicas' values, concatenated: `ReplicaContext.all_gather`."""
        return self.gather("all_gather", value, axis, options)


announce_errors(
    StrategyExtended,
    (
        *("call_for_each_replica", "merge_call", "reduce_to", "batch_reduce_to"),
        *("broadcast_to", "audit_variables", "all_reduce", "all_gather"),
    ),
    lambda extended: extended.consensus,
)


def _first_difference(group: ReplicaGroup, call: str, array: Any) -> str:
    """Return the first element that is not replica 0's on all ranks, with its values.

    Collective.
    """
    local = np.ascontiguousarray(arrays.to_host(array))
    first = arrays.to_host(group.broadcast_from_first(call, array))
    # Compare bytes, as the checksum did: nan equals nan, and 0.0 is not -0.0
    differs = (arrays.value_bytes(local) != arrays.value_bytes(first)).any(axis=1)
    local_index = int(np.argmax(differs)) if differs.any() else local.size
    gather = group.consensus.gather_objects
    index = min(gather(call, lambda: local_index))
    values = gather(call, lambda: repr(local.reshape(-1)[index]))
    element = tuple(int(i) for i in np.unravel_index(index, local.shape))
    return f"{element}: {group_by_rank(values)}"


class MultiStepContext:
    """The outputs of the steps of `experimental_run_steps_on_iterator`.

    Attributes:
      last_step_outputs: by name, the last value passed to `set_last_step_output`.
      non_tensor_outputs: by name, the last value passed to `set_non_tensor_output`.

    Example:
      >>> data = mpidist.Dataset.from_tensor_slices(np.ones((4, 3))).batch(2)
      >>> end = strategy.extended.experimental_run_steps_on_iterator(
      ...     lambda context, x: context.set_last_step_output("sum", x, "SUM"),
      ...     iter(strategy.experimental_distribute_dataset(data)),
      ... )
      >>> end.last_step_outputs["sum"]
      array([[2., 2., 2.]])
    """

    def __init__(self, initial_loop_values: Any = None):
        values = {} if initial_loop_values is None else initial_loop_values
        if not isinstance(values, Mapping):
            raise ArgumentTypeError(
                f"initial_loop_values must be a dict, not {validation.shown(values)}"
            )
        self.last_step_outputs: dict[str, Any] = dict(values)
        self.non_tensor_outputs: dict[str, Any] = {}

    def __repr__(self) -> str:
        return one_line(self, lambda: f"outputs {sorted(self.last_step_outputs)}")

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Store `output`, reduced over the replicas if `reduce_op` (collective)."""
        if reduce_op is not None:
            output = get_strategy().reduce(reduce_op, output)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Store `output` unchanged."""
        self.non_tensor_outputs[name] = output
