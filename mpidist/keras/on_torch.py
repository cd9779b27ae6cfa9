"""What the ranks do together where Keras computes with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mpidist.strategy.strategy import Strategy
from mpidist.torch import as_tensors as convert  # noqa: F401
from mpidist.torch import devices
from mpidist.torch.compat import keep_untraced

# The method of optimizers that is given a step's gradients, as this argument
APPLY, GRADIENTS = "apply", 0
keep_untraced()


def run(work: Callable[[], Any]) -> Any:
    """Return `work()`, which trains."""
    return work()


def seed(rank: int) -> None:
    """Let ranks draw unlike numbers: without a seed, Keras' dropout asks PyTorch."""
    if rank:
        torch.manual_seed(torch.initial_seed() + rank)


def all_sum(strategy: Strategy, call: str, tensors: Sequence[Any]) -> list[Any]:
    """Return the sums of tensors over all ranks. Collective."""
    with devices.on_stream_of(tensors[0]):
        arrays = [devices.as_array(tensor.contiguous()) for tensor in tensors]
        sums = strategy.extended.collectives.all_reduce(call, "SUM", arrays)
        return [devices.as_tensor(array) for array in sums]


def divided(sums: list[Any], total: Any) -> list[Any]:
    """Return sums, which are not needed any more, divided by a number."""
    if float(total) != 1:  # as of a whole batch
        torch._foreach_div_(sums, float(total))
    return sums


def stack(strategy: Strategy, call: str, tensor: Any) -> Any:
    """Return all ranks' tensors, `(ranks, *shape)`. Collective, derivatives as well."""
    return _Stack.apply(strategy, call, tensor)


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, strategy: Strategy, call: str, tensor: Any) -> Any:
        context.where = strategy, call
        with devices.on_stream_of(tensor):
            rows = devices.as_array(tensor[None].contiguous())
            gathered = strategy.extended.collectives.all_gather(call, rows, 0)
            return devices.as_tensor(gathered)

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        strategy, call = context.where
        (total,) = all_sum(strategy, f"the derivatives of {call}", [gradient])
        return None, None, total[strategy.rank]


def is_lost(tensor: Any) -> bool:
    """Return False: a step that fails leaves the weights."""
    return False


def copies(values: Sequence[Any]) -> list[Any]:
    """Return tensors that stay as they are when variables change."""
    return [value.detach().clone() for value in values]
