"""Objects that have a state: `get_state` and `set_state`, or PyTorch's `state_dict`.

PyTorch is not imported here: a program with such objects has imported it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpidist.checkpoint.overlaps import Write
from mpidist.checkpoint.tree import METADATA, NDARRAY, TENSOR, Typed, keep_versions
from mpidist.device import arrays
from mpidist.errors import CheckpointError
from mpidist.util import nest

__all__ = ["has_state", "memory_of", "read_state", "write_state"]

_PAIRS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))


def _has(value: Any, names: tuple[str, str]) -> bool:
    return all(callable(getattr(value, name, None)) for name in names)


def has_state(value: Any) -> bool:
    """Return whether `value` has the methods that read and write a state."""
    return not isinstance(value, type) and any(_has(value, pair) for pair in _PAIRS)


def read_state(value: Any) -> Any:
    """Return the state of an object: a nest of arrays, numbers and text."""
    if _has(value, _PAIRS[0]):
        return value.get_state()
    state = value.state_dict()
    return _map(_to_typed, state) if _is_of_torch(value, state) else state


def _map(fn: Callable[[Any], Any], state: Any) -> Any:
    made = nest.map_leaves(fn, state)
    keep_versions(state, made)
    return made


def write_state(value: Any, state: Any) -> None:
    """Set the state of an object, as returned by `read_state`.

    Raises:
      CheckpointError: a name, shape or dtype does not match.
      What `set_state` or `load_state_dict` raises.
    """
    is_typed = any(isinstance(leaf, Typed) for leaf in nest.flatten(state)[0])
    if _has(value, _PAIRS[0]):
        value.set_state(_map(_to_plain, state) if is_typed else state)
        return
    now = value.state_dict()
    if is_typed or _is_of_torch(value, now):
        state = _map(_from_typed, state)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.nn.Module):
            state = _renamed(state, now)
            _require_fit(now, state)
    try:
        value.load_state_dict(state)
    except (ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"the state does not match: {error}") from error


def memory_of(value: Any, state: Any) -> Iterator[Write]:
    """Yield what `write_state` writes into memory that it does not choose.

    That is, into the tensors of a PyTorch module, which other places may share.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.nn.Module):
        return
    if isinstance(state, dict):
        state = _renamed(state, value.state_dict())
    named = {"remove_duplicate": False}
    for name, tensor in [
        *value.named_parameters(**named),
        *value.named_buffers(**named),
    ]:
        new = _to_plain(state.get(name)) if isinstance(state, dict) else None
        is_plain = not torch.nn.parameter.is_lazy(tensor) and (
            type(tensor.detach()) is torch.Tensor and tensor.layout is torch.strided
        )
        if not is_plain or not isinstance(new, np.ndarray) or not tensor.data_ptr():
            continue
        shape, item_bytes = tuple(tensor.shape), tensor.element_size()
        if (new.shape, new.itemsize) == (shape, item_bytes):
            strides = tuple(step * item_bytes for step in tensor.stride())
            address = tensor.data_ptr()
            yield Write(
                (name,),
                functools.partial(np.asarray, new),
                address,
                shape,
                strides,
                item_bytes,
                True,
            )


def _renamed(state: Any, now: Any) -> Any:
    """Return a module's state by the names of `now`, which may be wrapped otherwise.

    DistributedDataParallel begins names with "module."; torch.compile puts "_orig_mod."
    before those of what it has compiled.
    """
    if state.keys() == now.keys():
        return state
    names = {_unwrapped(name): name for name in now}
    saved = {_unwrapped(name): name for name in state}
    if names.keys() != saved.keys() or len(names) < len(now) or len(saved) < len(state):
        return state  # the error names what is missing
    made = type(state)((name, state[saved[plain]]) for plain, name in names.items())
    versions = getattr(state, METADATA, None)
    if versions is not None:
        here = {_unwrapped(name): name for name in getattr(now, METADATA, {})}
        renamed = {
            here.get(_unwrapped(n), n): version for n, version in versions.items()
        }
        setattr(made, METADATA, renamed)
    return made


def _unwrapped(name: str) -> str:
    plain = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(plain[1:] if plain[:1] == ["module"] else plain)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _is_of_torch(value: Any, state: Any) -> bool:
    """Return whether the arrays of a state are tensors; a new optimizer has none."""
    bases = {base.__module__.partition(".")[0] for base in type(value).__mro__}
    is_of_torch = "torch" in bases and "torch" in sys.modules
    return is_of_torch or any(map(_is_tensor, nest.flatten(state)[0]))


def _to_typed(leaf: Any) -> Any:
    """Return a tensor as an array that shares its memory, if it is in C order."""
    if _is_tensor(leaf):
        return Typed(arrays.to_array(leaf.detach().contiguous()), TENSOR)
    return Typed(leaf, NDARRAY) if _is_array(leaf) else leaf


def _from_typed(leaf: Any) -> Any:
    """Undo `_to_typed`, with a copy that no other code changes.

    Older versions did not save what an array was: most were tensors.
    """
    plain = _to_plain(leaf)
    if not _is_array(plain):
        return leaf
    is_tensor = "torch" in sys.modules and getattr(leaf, "role", TENSOR) == TENSOR
    # An optimizer keeps it
    like = sys.modules["torch"].empty(0) if is_tensor else plain
    return arrays.like(plain.copy(), like)


def _to_plain(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, Typed) else leaf


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or arrays.is_device_array(value)


def _require_fit(now: Any, state: Any) -> None:
    """Raise unless two states of a module have the same names, shapes and dtypes.

    Extra states are the module's own. Of modules of another version, PyTorch decides:
    they may convert older states.
    """
    here, saved = (getattr(s, METADATA, {}) for s in (now, state))
    if any(here[name] != saved[name] for name in here.keys() & saved.keys()):
        return
    for what, names in (
        ("lacks", now.keys() - state.keys()),
        ("has names that the model lacks:", state.keys() - now.keys()),
    ):
        if names:
            raise CheckpointError(f"the checkpoint {what} {sorted(names)[:5]}")
    for name, tensor in now.items():
        if not _is_tensor(tensor) or name.rpartition(".")[2] == "_extra_state":
            continue
        found = state[name]
        kinds = [
            (str(getattr(a, "dtype", type(a))), tuple(getattr(a, "shape", ())))
            for a in (tensor, found)
        ]
        if kinds[0] != kinds[1]:
            (dtype, shape), (other, other_shape) = kinds
            raise CheckpointError(
                f"{name} is {dtype} of shape {shape}, and {other} of shape "
                f"{other_shape} in the checkpoint"
            )
