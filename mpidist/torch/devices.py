"""Tensors and the arrays that share their memory: of NumPy, or of CuPy on a GPU."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.device import arrays
from mpidist.device.streams import external_stream
from mpidist.errors import ContextError

__all__ = [
    "as_array",
    "as_tensor",
    "as_trainer",
    "is_on_gpu",
    "on_stream_of",
    "place_of",
]


def is_on_gpu(tensor: Any) -> bool:
    """Return whether a tensor lies on a GPU."""
    return bool(tensor.device.type == "cuda")


def as_array(tensor: Any) -> Any:
    """Return a tensor as an array that shares its memory.

    On a GPU, what CuPy's current stream does with it comes after what PyTorch's current
    stream was told before.
    """
    tensor = tensor.detach()
    return arrays.to_array(tensor) if is_on_gpu(tensor) else tensor.numpy()


def as_tensor(array: Any) -> Any:
    """Return an array as a tensor that shares its memory; see `as_array`."""
    if arrays.is_device_array(array):
        return torch.from_dlpack(array)
    return torch.from_numpy(array)


def on_stream_of(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Make PyTorch's current stream CuPy's, where a tensor lies on a GPU.

    So what the library does with the tensor comes in the order of the program.
    """
    if not is_on_gpu(tensor):
        return contextlib.nullcontext()
    stream = torch.cuda.current_stream(tensor.device)
    return external_stream(stream.cuda_stream, tensor.device.index)


def place_of(tensor: Any) -> str:
    """Return where a tensor lies, as a replica's device is called: "GPU:0", "CPU:0"."""
    return f"GPU:{tensor.device.index}" if is_on_gpu(tensor) else "CPU:0"


def as_trainer(
    group: ReplicaGroup, tensor: Any, trainer: int, call: str
) -> contextlib.AbstractContextManager[Any]:
    """Let this thread communicate for the one that waits for it in `backward`.

    PyTorch calls hooks of what lies on a GPU in threads of its own.

    Args:
      group: the ranks.
      tensor: what it is about.
      trainer: the thread that waits, or this one.
      call: for messages.

    Raises:
      ContextError: another thread than `trainer` has made the strategy, which cannot
        be used any more; on the others a CollectiveError.
    """
    lock = group.consensus.lock
    if not is_on_gpu(tensor) or threading.get_ident() == trainer:
        return contextlib.nullcontext()
    if trainer != lock.creator:
        error = ContextError(
            f"{call}: a model on a GPU is to be trained in the thread that has made "
            "the strategy"
        )
        group.consensus.leave(error)  # other ranks may wait for this one
        raise error
    group.use_device()
    return lock.stand_in()
