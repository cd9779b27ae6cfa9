"""Weights of ranks with unlike numbers of rows, in backward passes.

PyTorch averages the ranks' gradients. To make that the mean over all rows, they are
multiplied by this rank's rows, times the ranks, by the rows of all: where they enter
the model, so that each of several passes has its own weight. Where they leave it, by
the inputs, they are divided by that again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mpidist.comm.consensus.signatures import name_ranks
from mpidist.errors import ArgumentError, MismatchError
from mpidist.torch import compat
from mpidist.util.serialization import hash62

# In place of rows, in what ranks exchange; Python's hashes of -1 and -2 are the same
_UNSTATED, ENDED = -1.0, -3.0
_CALL = "the backward pass of DistributedDataParallel"
_HINT = (
    "state how many rows each rank's mean loss has, by batches of as_tensors, rows=len "
    "(called with the inputs) or set_rows(); or weigh ranks the same by rows='equal'; "
    "a loss that is divided by the rows of all ranks takes reduction='sum'"
)


class Pass:
    """One forward pass of a model, which backward passes go through.

    Args:
      find_weight: returns the weight of a backward pass of this; collective.
      is_synced: whether its gradients are averaged.
      rows: of this rank's mean loss; None for unstated.
      axes: of inputs, as bits, whose length are the rows; -1 if the user states these.
    """

    def __init__(
        self,
        find_weight: Callable[[Pass], float],
        is_synced: bool,
        rows: float | None,
        axes: int = -1,
    ):
        self._find_weight = find_weight
        self.is_synced, self.rows, self.axes = is_synced, rows, axes
        self.shapes: list[int] = []  # the first dimensions of tensors
        self.outputs: list[Any] = []  # which PyTorch searches for unused parameters
        self.is_entered = False
        self._task = 0
        self._found = 1.0

    def enter(self) -> float:
        """Return the weight of the gradients of this backward pass. Collective."""
        self.is_entered = True
        self._found, self._task = self._find_weight(self), compat.current_task()
        return self._found

    def leave(self) -> float:
        """Return by what gradients of inputs are multiplied. Not collective."""
        if self._task != compat.current_task():  # it has not come through the outputs
            return 1.0
        return 1 / self._found if self._found else 0.0


class Weighed(torch.autograd.Function):
    """Tensors as they are, whose gradients are multiplied by a weight.

    The weight is asked for once in each backward pass: see `Pass.enter`, for the
    outputs of a model, and `Pass.leave`, for its inputs.
    """

    @staticmethod
    def forward(context: Any, weight: Callable[[], float], *tensors: Any) -> Any:
        """Return the tensors."""
        context.weight = weight
        context.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Return the gradients times the weight."""
        weight = context.weight()
        return None, *(_scaled(gradient, weight) for gradient in gradients)


class _Scale(torch.autograd.Function):
    """A gradient times a number.

    Penalties of gradients differentiate it again. What comes back then is not
    multiplied: at the inputs it goes into the model, where it needs this rank's weight,
    which the division would take away; at the outputs it goes out, and must have none.
    """

    @staticmethod
    def forward(context: Any, gradient: Any, weight: float) -> Any:
        # Whatever it is: a mean over no rows has the gradient nan
        return gradient * weight if weight else torch.zeros_like(gradient)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        return gradient, None


def _scaled(gradient: Any, weight: float) -> Any:
    if gradient is None or weight == 1:
        return gradient
    return _Scale.apply(gradient, weight)


def exchange_rows(
    group: Any,
    rows: float | None,
    axes: int = -1,
    shapes: Sequence[int] = (),
    is_of_present: bool = False,
    model: int = 0,
) -> float | None:
    """Return the weight of this rank's gradients in PyTorch's mean. Collective.

    Args:
      group: the process group.
      rows: of this rank; None for unstated, or `ENDED`.
      axes: see `Pass`. Such rows count if all ranks have them along the same axis: what
        only looks like a batch, which another model gets, does not.
      shapes: must be equal on all ranks if `rows` is unstated.
      is_of_present: whether PyTorch's mean is over the ranks that have not ended.
      model: its number among those of the group.

    Returns:
      None if ranks weigh the same because no rows are stated.

    Raises, on all ranks:
      ArgumentError: rows are unstated and shapes differ; or some ranks state rows.
      MismatchError: models differ.
    """
    own_rows = _UNSTATED if rows is None else rows
    table = _gather(group, own_rows, axes, tuple(shapes), model)
    if len(table) == 1:  # equal on all ranks
        return 0.0 if own_rows in (0, ENDED) else None if rows is None else 1.0
    if len({number for *_, number in table}) > 1:
        raise MismatchError(
            "the ranks are in the backward passes of different models: number "
            f"{[int(number) for *_, number in table]} of those that were wrapped"
        )
    present = [line for line in table if line[0] != ENDED]
    without = [rank for rank, line in enumerate(table) if line[0] == _UNSTATED]
    is_stated = any(rows != _UNSTATED and int(axes) < 0 for rows, axes, *_ in present)
    common = functools.reduce(operator.and_, [int(axes) for _, axes, *_ in present])
    if not is_stated and (without or not common):
        _require_one_shape(present)
        return None
    if without:
        raise ArgumentError(
            f"{name_ranks(without)} stated no rows, and other ranks did; {_HINT}"
        )
    total = sum(rows for rows, *_ in present)
    ranks = len(present if is_of_present else table)
    if not total or own_rows == ENDED:
        return 0.0
    is_equal = len(present) == ranks and len({rows for rows, *_ in present}) == 1
    return 1.0 if is_equal else own_rows * ranks / total


def _gather(group: Any, rows: float, axes: int, shapes: Any, model: int) -> list[Any]:
    """Return those of all ranks, or one line if they are equal. Collective."""
    operations = getattr(group, "operations", None)
    if operations is not None:
        table: list[Any] = operations.share(_CALL, (rows, axes, shapes, model))
        return table
    # A group of another backend
    device = compat.find_device(group)
    checksum = hash62(repr(shapes)) >> 10  # 52 bits are exact in float64
    numbers = rows, axes, checksum, model
    mine = torch.tensor(numbers, dtype=torch.float64, device=device)
    every = mine.new_empty(group.size() * len(numbers))
    compat.all_gather_single(every, mine, group=group)
    table = every.view(-1, len(numbers)).tolist()
    return table if any(line != table[0] for line in table) else table[:1]


def _require_one_shape(table: Sequence[Any]) -> None:
    every = [line[2] for line in table]
    if len(set(every)) > 1:
        first = [shapes[:1] for shapes in every if isinstance(shapes, tuple)]
        shown = f"the first: {[n for (n,) in first]}" if all(first) else "checksums"
        raise ArgumentError(
            "the inputs or outputs of a DistributedDataParallel have unlike first "
            f"dimensions on the ranks ({shown}); {_HINT}"
        )


_batches = threading.local()


def note_batch(iterator: Any, batch: Any) -> None:
    """Remember how many rows this replica's batch has, until the iterator's next."""
    if not hasattr(_batches, "rows"):
        _batches.rows = weakref.WeakKeyDictionary()
    first = next((t for t in tensors_in(batch) if t.dim()), None)
    _batches.rows[iterator] = None if first is None else len(first)


def batch_rows(tensors: Sequence[Any]) -> tuple[int | None, int]:
    """Return the rows of the batch of `as_tensors` from which a model's inputs are.

    That is one of this thread's current batches, whose number of rows is the first
    dimension of an input, or else another; with the axes, as bits. None if there is
    none, or several that have unlike numbers.
    """
    current = set(getattr(_batches, "rows", {}).values()) - {None}
    if not current:
        return None, -1
    first = {len(tensor) for tensor in tensors if tensor.dim()}
    every = {(length, i) for t in tensors for i, length in enumerate(t.shape)}
    lengths = current & first or current & {length for length, _ in every}
    if len(lengths) != 1:
        return None, -1
    (rows,) = lengths
    return rows, sum(1 << i for length, i in every if length == rows)


def tensors_in(nest: Any) -> Iterator[Any]:
    """Yield the tensors in tuples, lists, dicts and dataclasses."""
    if isinstance(nest, torch.Tensor):
        yield nest
        return
    for part in _parts(nest):
        yield from tensors_in(part)


def _parts(nest: Any) -> Sequence[Any]:
    if isinstance(nest, list | tuple):
        return nest
    if isinstance(nest, Mapping):
        return list(nest.values())
    if dataclasses.is_dataclass(nest) and not isinstance(nest, type):
        return [getattr(nest, field.name) for field in dataclasses.fields(nest)]
    return ()


# What is looked through for tensors in one output or input
_MOST_OBJECTS = 10_000
_LEAVES = (str, bytes, int, float, complex, type(None), type, types.ModuleType)
_KNOWN = (torch.Tensor, np.ndarray, np.generic, *_LEAVES)
_OTHERS = (torch.nn.Module, types.FunctionType, *_LEAVES)


def escaping(nest: Any, is_output: bool) -> Any:
    """Return what holds tensors with gradients that `tensors_in` does not find.

    Such as a distribution; None if there is nothing. An output that computes something
    later counts, too: a function, or an iterator.
    """
    for leaf in _opaque(nest):
        is_later = is_output and (callable(leaf) or isinstance(leaf, Iterator))
        if is_later or _has_gradients(leaf):
            return leaf
    return None


def _opaque(nest: Any) -> Iterator[Any]:
    if isinstance(nest, _KNOWN):
        return
    if isinstance(nest, list | tuple | Mapping) or dataclasses.is_dataclass(nest):
        for part in _parts(nest):
            yield from _opaque(part)
    else:
        yield nest


def _has_gradients(leaf: Any) -> bool:
    waiting, seen = [leaf], {id(leaf)}
    while waiting and len(seen) < _MOST_OBJECTS:
        for part in gc.get_referents(waiting.pop()):
            if isinstance(part, torch.Tensor):
                if part.requires_grad:
                    return True
            elif id(part) not in seen and not isinstance(part, _OTHERS):
                seen.add(id(part))
                waiting.append(part)
    return False


def attributes_in_graph(module: torch.nn.Module) -> set[str]:
    """Return the attributes of a user's modules that hold results with gradients."""
    return {
        f"{prefix}{'.' if prefix else ''}{name}"
        for prefix, own in module.named_modules()
        if not type(own).__module__.startswith("torch.")
        for name, value in vars(own).items()
        if name not in _OF_MODULES
        and not isinstance(value, _LEAVES)
        and _is_of_graph(value)
    }


_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"_buffers"}


def _is_of_graph(value: Any) -> bool:
    if any(tensor.grad_fn is not None for tensor in tensors_in(value)):
        return True
    return any(map(_has_gradients, _opaque(value)))


def replace_tensors(nest: Any, others: dict[int, Any]) -> Any:
    """Return a nest with other tensors in place of those with these ids."""
    if isinstance(nest, torch.Tensor):
        return others.get(id(nest), nest)
    parts = _parts(nest)
    new = [replace_tensors(part, others) for part in parts]
    if all(a is b for a, b in zip(parts, new)):
        return nest
    if isinstance(nest, list | tuple):
        return type(nest)(*new) if hasattr(nest, "_fields") else type(nest)(new)
    other = copy.copy(nest)
    if isinstance(nest, Mapping):
        for key, part in zip(nest, new):
            other[key] = part
    else:
        for field, part in zip(dataclasses.fields(nest), new):
            object.__setattr__(other, field.name, part)
    return other
