"""What the ranks do together where Keras computes with JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mpidist.jax
from mpidist.jax import as_jax as convert  # noqa: F401
from mpidist.jax.runtime import call_with_own_errors as run  # noqa: F401
from mpidist.strategy.strategy import Strategy

# The method of optimizers that is given a step's gradients, as this argument
APPLY, GRADIENTS = "stateless_apply", 1


def seed(rank: int) -> None:
    """Do nothing: what Keras draws depends on variables alone."""


def all_sum(strategy: Strategy, call: str, arrays: Sequence[Any]) -> list[Any]:
    """Return the sums of arrays over all ranks. Collective."""
    return list(mpidist.jax.all_reduce("SUM", list(arrays), strategy=strategy))


def divided(sums: list[Any], total: Any) -> list[Any]:
    """Return sums divided by a number."""
    return [array / total.astype(array.dtype) for array in sums]


def stack(strategy: Strategy, call: str, array: Any) -> Any:
    """Return all ranks' arrays, `(ranks, *shape)`. Collective, derivatives as well."""
    return mpidist.jax.all_gather(array[None], strategy=strategy)


def is_lost(array: Any) -> bool:
    """Return whether a step that failed had taken an array's memory."""
    return bool(array.is_deleted())


copies = list  # arrays stay as they are when variables change
