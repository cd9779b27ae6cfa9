"""The states of random generators, as nests of integers and arrays."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["checked_state", "derived_state", "is_generator", "set_state", "state_of"]

_PYTHONS = "random.Random"


def is_generator(value: Any) -> bool:
    """Return whether `value` is a random generator of NumPy or of Python."""
    return isinstance(value, np.random.Generator | np.random.RandomState) or (
        type(value) is random.Random
    )


def state_of(generator: Any) -> dict[str, Any]:
    """Return a generator's state."""
    if isinstance(generator, random.Random):
        version, numbers, gauss = generator.getstate()
        return {
            "bit_generator": _PYTHONS,
            "version": version,
            "numbers": np.array(numbers, np.uint32),
            "gauss": gauss,
        }
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    return dict(generator.bit_generator.state)


def set_state(generator: Any, state: Any) -> None:
    """Let a generator go on from a state of its kind.

    Raises: ValueError, TypeError, KeyError, ...: it is none.
    """
    if isinstance(generator, random.Random):
        numbers = tuple(int(number) for number in state["numbers"])
        generator.setstate((state["version"], numbers, state["gauss"]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def checked_state(generator: Any, state: Any) -> Any:
    """Return `state` if a generator like this one can go on from it.

    Raises:
      ValueError: it cannot.
    """
    kind = state_of(generator)["bit_generator"]
    found = state.get("bit_generator") if isinstance(state, dict) else None
    if found != kind:
        raise ValueError(f"expected a state of {kind}, found one of {found}")
    try:
        trial = _fresh(generator, 0)
        set_state(trial, state)
        state_of(trial)
    except Exception as error:  # classes of others may raise anything
        raise ValueError(f"the state of {kind} is damaged: {error!r}") from error
    return state


def derived_state(generator: Any, states: Sequence[Any], rank: int) -> Any:
    """Return the state for a rank that had none: seeded by all states and its number.

    It is the same for the same states, and differs from rank to rank.
    """
    hashed = hashlib.blake2b(digest_size=16)
    for state in states:
        hashed.update(_text(state).encode())
    return state_of(_fresh(generator, int.from_bytes(hashed.digest(), "big"), rank))


def _text(state: Any) -> str:
    if isinstance(state, dict):
        return repr([(key, _text(state[key])) for key in sorted(state)])
    return state.tobytes().hex() if isinstance(state, np.ndarray) else repr(state)


def _fresh(generator: Any, *seeds: int) -> Any:
    """Return a generator of the same kind."""
    if isinstance(generator, random.Random):
        return random.Random(repr(seeds))
    seed = np.random.SeedSequence(seeds)
    if isinstance(generator, np.random.RandomState):
        return np.random.RandomState(type(generator._bit_generator)(seed))
    return np.random.Generator(type(generator.bit_generator)(seed))
