"""Fixtures for tests of what trains over the process group of `mpidist.torch`."""

from __future__ import annotations

import pytest


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
