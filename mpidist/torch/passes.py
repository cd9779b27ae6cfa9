"""Forward and backward passes: count a loss's rows, and find a backward pass's end.

A hook on the outputs of a forward pass runs when a backward pass reaches them. So only
the rows of forward passes that the loss depends on count. The hook also identifies the
outermost backward pass: torch.utils.checkpoint with use_reentrant=True runs others
inside it.
"""

from __future__ import annotations

import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mpidist.comm.consensus.signatures import skip_folder
from mpidist.errors import UnsupportedError
from mpidist.torch.parameters import CALL

__all__ = [
    "Backward",
    "Forward",
    "Joining",
    "Share",
    "add_rows",
    "count_rows",
    "current_task",
    "require_eager_backward",
    "watch",
]

# Returns the number of this thread's backward pass; nested passes have other numbers
current_task = torch._C._current_graph_task_id
# Messages name the user's call of backward
skip_folder(str(Path(torch.__file__).parent))


class Share(NamedTuple):
    """One rank's share in a step.

    Args:
      rows: the number of rows of its loss; -1 if all ranks have the same weight.
      used: a bit for each parameter that has a gradient; -1 for all.
      frozen: a bit for each parameter that requires no gradient any more.
      has_ended: whether it has no batches any more; see `Joining`.
    """

    rows: int
    used: int
    frozen: int = 0
    has_ended: bool = False


class Joining(NamedTuple):
    """How ranks with different numbers of batches train; see `join`.

    Args:
      counts_all: if ranks have the same weight, whether the mean still divides by the
        number of all ranks after some have ended; else by that of the others.
      raises: whether it is an error as soon as the first rank has ended.
    """

    counts_all: bool
    raises: bool


class Forward:
    """A forward pass. The graph of its outputs keeps it alive.

    Args:
      rows: the number of rows of its batch; -1 if unknown.
      is_syncing: whether its gradients are reduced: false in a block of `no_sync`.
      generation: the number of calls of set_rows before it.
    """

    __slots__ = ("__weakref__", "generation", "is_syncing", "rows", "task")

    def __init__(self, rows: int, is_syncing: bool, generation: int):
        self.rows, self.is_syncing, self.generation = rows, is_syncing, generation
        self.task = -1  # the number of the last backward pass that reached it


class Backward:
    """A backward pass. PyTorch calls it at the end, or deletes it after an exception.

    Args:
      task: its number.
      is_syncing: whether its gradients are reduced.
      end: called with the pass at its end.
      drop: called instead if an exception ended it.
    """

    def __init__(
        self,
        task: int,
        is_syncing: bool,
        end: Callable[[Backward], None],
        drop: Callable[[], None],
    ):
        self.task, self.is_syncing = task, is_syncing
        self.rows: int | None = None  # of the forward passes that it reached
        self.has_outputs = False  # whether it reached one
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


def require_eager_backward() -> None:
    """Raise in a backward pass of PyTorch's Compiled Autograd.

    It does not call `Backward` at its end, so that nothing would be averaged.

    Raises:
      UnsupportedError: it is one.
    """
    # Not imported before, as that takes long: then there is none
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(module, "in_compiled_autograd_region", False):
        raise UnsupportedError(
            f"{CALL} does not support Compiled Autograd: set "
            "torch._dynamo.config.compiled_autograd = False"
        )


def watch(output: Any, reach: Callable[[], None]) -> bool:
    """Call `reach` whenever a backward pass reaches a tensor in `output`.

    Returns:
      Whether `output` has a tensor that a backward pass can reach.
    """

    def on_backward(_: Any) -> None:
        reach()

    is_watched = False
    for tensor in _tensors_in(output):
        # Not on a leaf, such as a parameter: the hook would outlive this pass
        if tensor.grad_fn is not None:
            tensor.register_hook(on_backward)
            is_watched = True
    return is_watched


def add_rows(first: int | None, second: int | None) -> int | None:
    """Return the sum of two numbers of rows; None means none yet, -1 unknown."""
    if first is None or second is None:
        return second if first is None else first
    return -1 if min(first, second) < 0 else first + second


def count_rows(inputs: Any, kwargs: Any, dim: int) -> int:
    """Return the first tensor's length along `dim`; -1 if there is no tensor."""
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
