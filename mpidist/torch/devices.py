"""Tensors on GPUs: names of devices, and the order of streams and threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch

from mpidist.comm.replica_group import ReplicaGroup
from mpidist.device.streams import external_stream
from mpidist.errors import ContextError
from mpidist.torch.weights import tensors_in


def on_stream_of(tensor: Any) -> contextlib.AbstractContextManager[Any]:
    """Make PyTorch's current stream CuPy's in a block, if a tensor is on a GPU.

    So this library's work on the tensor is ordered with PyTorch's.
    """
    if not tensor.is_cuda:
        return contextlib.nullcontext()
    stream = torch.cuda.current_stream(tensor.device)
    return external_stream(stream.cuda_stream, tensor.device.index)


def device_name(tensor: Any) -> str:
    """Return the name of a tensor's device, as of a replica: "GPU:0" or "CPU:0"."""
    kind = "GPU" if tensor.is_cuda else tensor.device.type.upper()
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
    if not tensor.is_cuda or threading.get_ident() == trainer:
        return contextlib.nullcontext()
    if trainer != lock.creator:
        error = ContextError(
            f"{call}: train a model on a GPU in the thread that created the strategy"
        )
        group.consensus.leave(error)  # other ranks may wait for this one
        raise error
    group.use_device()
    return lock.stand_in()
