"""Tests of `mpidist.torch`, which are skipped where there is no PyTorch."""

import importlib.util
import os

import pytest

from mpidist.device.binding import gpu_count

if importlib.util.find_spec("torch") is None:
    assert os.environ.get("GATE_NEED_TORCH") != "1", "PyTorch is not installed"
else:
    import torch

    torch.set_num_threads(1)  # ranks share the cores


@pytest.fixture(autouse=True)
def no_process_group_stays():
    """End the default process group, which `DistributedDataParallel` makes."""
    had_one = torch.distributed.is_initialized()
    yield
    if torch.distributed.is_initialized() and not had_one:
        torch.distributed.destroy_process_group()


@pytest.fixture
def tensors_pass_for_cuda(monkeypatch):
    """Let tensors on the CPU pass for tensors on the current GPU.

    What the ranks send and receive is copied to the GPU and back, and what lies between
    is the real thing. With an emulated GPU and its late streams this shows whether
    collectives wait for what they need.
    """
    if not gpu_count() or torch.cuda.is_available():
        pytest.skip("needs CuPy with a GPU, and PyTorch without one")
    import cupy

    from mpidist.torch import devices

    def as_array(tensor):
        return cupy.asarray(tensor.detach().resolve_conj().resolve_neg().numpy())

    def device_name(tensor):
        return "META:0" if tensor.is_meta else f"GPU:{cupy.cuda.Device().id}"

    patches = {
        "is_on_gpu": lambda tensor: not tensor.is_meta,
        "device_name": device_name,
        "as_array": as_array,
        "as_tensor": lambda array: torch.from_numpy(array.get()),
        "on_stream_of": lambda tensor: cupy.cuda.get_current_stream(),
    }
    for name, function in patches.items():
        monkeypatch.setattr(devices, name, function)
