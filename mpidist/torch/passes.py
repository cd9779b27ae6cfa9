"""Forward and backward passes: which rows a loss is of, and where a backward pass ends.

Hooks on the outputs of a forward pass run when a backward pass reaches them. So only
forward passes that the loss depends on count, and the end of the outermost backward
pass is known, although checkpoints with use_reentrant=True run others inside it.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

__all__ = [
    "Backward",
    "Forward",
    "Joining",
    "Share",
    "add_rows",
    "count_rows",
    "current_task",
    "watch",
]

# The number of the backward pass in this thread; nested ones have their own
current_task = torch._C._current_graph_task_id


class Share(NamedTuple):
    """What one rank contributes to a step.

    Args:
      rows: how many rows its loss is a mean of; -1 where every rank counts the same.
      used: a bit for each parameter that has a gradient; -1 for all.
      has_ended: whether it has no batches any more, see `Joining`.
    """

    rows: int
    used: int
    has_ended: bool = False


class Joining(NamedTuple):
    """How ranks with unlike numbers of batches train; see `join`.

    Args:
      counts_all: whether a rank that has ended counts as one without rows, where ranks
        count the same; else the mean is that of the others.
      raises: whether it is an error when the first rank has ended.
    """

    counts_all: bool
    raises: bool


class Forward:
    """A forward pass; it lives as long as the graph of its outputs.

    Args:
      rows: the length of its batch; -1 if unknown.
      is_syncing: whether its gradients are reduced: it is in no block of `no_sync`.
      generation: how often rows had been set by the user before.
    """

    __slots__ = ("__weakref__", "generation", "is_syncing", "rows", "task")

    def __init__(self, rows: int, is_syncing: bool, generation: int):
        self.rows, self.is_syncing, self.generation = rows, is_syncing, generation
        self.task = -1  # the last backward pass that reached it


class Backward:
    """One backward pass; PyTorch calls it at the end, or drops it after an error.

    Args:
      task: its number.
      is_syncing: whether its gradients are reduced.
      end: called at its end, with the pass.
      drop: called instead if an exception has ended it.
    """

    def __init__(
        self,
        task: int,
        is_syncing: bool,
        end: Callable[[Backward], None],
        drop: Callable[[], None],
    ):
        self.task, self.is_syncing = task, is_syncing
        self.rows: int | None = None  # of the forward passes that it has reached
        self.has_outputs = False  # whether it has reached one
        self.has_gradients = False
        self.is_finished = False
        self._end, self._drop = weakref.WeakMethod(end), weakref.WeakMethod(drop)

    def __call__(self) -> None:
        """End the pass."""
        self.is_finished = True
        end = self._end()
        if end is not None:
            end(self)

    def __del__(self) -> None:
        drop = self._drop()
        if self.is_syncing and not self.is_finished and drop is not None:
            drop()


def watch(output: Any, reach: Callable[[], None]) -> bool:
    """Call `reach` when a backward pass reaches one of the tensors in `output`.

    Returns whether there is such a tensor.
    """

    def on_backward(_: Any) -> None:
        reach()

    is_watched = False
    for tensor in _tensors_in(output):
        # A hook on a leaf, such as a parameter, would stay there
        if tensor.grad_fn is not None:
            tensor.register_hook(on_backward)
            is_watched = True
    return is_watched


def add_rows(first: int | None, second: int | None) -> int | None:
    """Return the sum of two numbers of rows: None for none yet, -1 if unknown."""
    if first is None or second is None:
        return second if first is None else first
    return -1 if min(first, second) < 0 else first + second


def count_rows(inputs: Any, kwargs: Any, dim: int) -> int:
    """Return the length of the first tensor along a dimension; -1 without a tensor."""
    for value in (*inputs, *kwargs.values()):
        tensor = next(_tensors_in(value), None)
        if tensor is not None:
            return int(tensor.shape[dim]) if tensor.ndim > dim else 1
    return -1


def _tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in a nest of dicts, lists, tuples and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _tensors_in(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _tensors_in(member)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors_in(getattr(value, field.name))
