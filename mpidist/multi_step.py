"""What `StrategyExtended.experimental_run_steps_on_iterator` gives its function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpidist import checks
from mpidist.context import get_strategy
from mpidist.errors import ArgumentTypeError
from mpidist.options import ReduceOp

__all__ = ["MultiStepContext"]


class MultiStepContext:
    """What the steps of `experimental_run_steps_on_iterator` leave behind.

    Attributes:
      last_step_outputs: by name, what `set_last_step_output` was given last.
      non_tensor_outputs: by name, what `set_non_tensor_output` was given last.

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
                f"initial_loop_values must be a dict, not {checks.shown(values)}"
            )
        self.last_step_outputs: dict[str, Any] = dict(values)
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(
        self, name: str, output: Any, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Keep `output`; with `reduce_op` reduced over all replicas (collective)."""
        if reduce_op is not None:
            output = get_strategy().reduce(reduce_op, output)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keep `output` as it is."""
        self.non_tensor_outputs[name] = output
