"""Tensors as arrays that share their memory (CuPy's on a GPU), and back."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.device import arrays
from mpidist.device.streams import external_stream
from mpidist.errors import ContextError
from mpidist.torch.weights import tensors_in


def is_on_gpu(tensor: Any) -> bool:
    """Return whether a tensor is on a GPU."""
    return bool(tensor.device.type == "cuda")


def as_array(tensor: Any) -> Any:
    """Return an array that shares a tensor's memory.

    On a GPU, work queued on CuPy's current stream afterwards waits for the work queued
    on PyTorch's current stream.
    """
    tensor = tensor.detach()
    return arrays.to_array(tensor) if is_on_gpu(tensor) else tensor.numpy()


def as_tensor(array: Any) -> Any:
    """Return a tensor that shares an array's memory; see `as_array`."""
    if arrays.is_device_array(array):
        return torch.from_dlpack(array)
    return torch.from_numpy(array)


def on_stream_of(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Make PyTorch's current stream CuPy's in a block, if a tensor is on a GPU.

    So this library's work on the tensor is ordered with PyTorch's.
    """
    if not is_on_gpu(tensor):
        return contextlib.nullcontext()
    stream = torch.cuda.current_stream(tensor.device)
    return external_stream(stream.cuda_stream, tensor.device.index)


def device_name(tensor: Any) -> str:
    """Return the name of a tensor's device, as of a replica: "GPU:0" or "CPU:0"."""
    kind = "GPU" if is_on_gpu(tensor) else tensor.device.type.upper()
    return f"{kind}:{tensor.device.index or 0}"


def after_stream(tensors: Any, run: Callable[[], None]) -> Callable[[], None]:
    """Return a function for another thread: between the work of this one's stream.

    It runs when what this thread's stream computes now has been computed, and ends when
    what it copies to the GPU is there. Where no tensor is on a GPU, it is `run`.
    """
    if not torch.cuda.is_initialized():
        return run
    on_gpu = (t for t in tensors_in(tensors) if t.is_cuda)
    device = next((tensor.device for tensor in on_gpu), None)
    if device is None:
        return run
    event = torch.cuda.current_stream(device).record_event()

    def synchronized() -> None:
        with torch.cuda.device(device):
            event.synchronize()
            run()
            torch.cuda.current_stream().synchronize()

    return synchronized


def as_trainer(
    group: ReplicaGroup, tensor: Any, trainer: int, call: str
) -> contextlib.AbstractContextManager[Any]:
    """Let this thread communicate in place of the one that waits in `backward`.

    PyTorch calls the hooks of tensors on a GPU in threads of its own.

    Args:
      group: the ranks.
      tensor: a tensor of the model.
      trainer: the thread that called `backward`.
      call: the public name, for messages.

    Raises:
      ContextError: `trainer` is not the thread that created the strategy. The strategy
        cannot be used any more; other ranks get a CollectiveError.
    """
    lock = group.consensus.lock
    if not is_on_gpu(tensor) or threading.get_ident() == trainer:
        return contextlib.nullcontext()
    if trainer != lock.creator:
        error = ContextError(
            f"{call}: train a model on a GPU in the thread that created the strategy"
        )
        group.consensus.mark_broken(error)  # other ranks may wait for this one
        raise error
    group.use_device()
    return lock.stand_in()
