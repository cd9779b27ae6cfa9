"""Fixtures for tests of what trains over the process group of `mpidist.torch`."""

import importlib.util
import os

import pytest

if os.environ.get("GATE_NEED_CLIENTS") == "1":
    for name in ("torch", "lightning", "accelerate", "transformers"):
        assert importlib.util.find_spec(name) is not None, f"{name} is not installed"


@pytest.fixture
def group(comm):
    """The process group of all ranks, for one test."""
    torch = pytest.importorskip("torch")
    import mpidist.torch  # noqa: F401  # makes the backend known

    torch.distributed.init_process_group("mpidist")
    yield torch.distributed.group.WORLD
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def rank(comm):
    return comm.rank


@pytest.fixture
def ranks(comm):
    return comm.size
