"""What differs between versions of PyTorch in torch.distributed."""

from __future__ import annotations

import datetime
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "DEFAULT_TIMEOUT",
    "all_gather_single",
    "finish_all",
    "keep_untraced",
    "may_wait",
    "name_of",
    "publish",
    "register",
    "seconds_of",
]

_c10d = torch._C._distributed_c10d
_OPS = {
    int(op.value) if hasattr(op, "value") else int(op): name
    for name, op in dist.ReduceOp.RedOpType.__members__.items()
}
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)


def name_of(op: Any) -> str:
    """Return the name of a reduction, such as "SUM"."""
    name: str = _OPS[int(op.op if hasattr(op, "op") else op)]
    return name


def may_wait(opts: Any) -> bool:
    """Return whether the thread that calls an operation will wait for it at once.

    In a backward pass a small one is faster without another thread.
    """
    return getattr(opts, "asyncOp", True) is False


def seconds_of(opts: Any, of_group: datetime.timedelta | None) -> float | None:
    """Return an operation's timeout in seconds; None for PyTorch's default.

    Args:
      opts: of the operation, or None.
      of_group: holds where `opts` has none.
    """
    own = getattr(opts, "timeout", None)
    found = of_group if own is None or own <= _ZERO else own
    return None if found in (None, DEFAULT_TIMEOUT) else found.total_seconds()


_ZERO = datetime.timedelta()
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
DEFAULT_TIMEOUT = dist.distributed_c10d.default_pg_timeout


def register(
    name: str,
    create: Callable[[Any, Any], Any],
    rendezvous_by_mpi: Callable[[datetime.timedelta], Iterator[Any]],
) -> None:
    """Make a backend known, and the rendezvous by MPI where nothing else is set."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])
    # A module that is hidden by its function of the same name
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    from_environment = handlers["env"]
    if getattr(from_environment, "is_by_mpi", False):
        return

    def handler(url: str, timeout: Any = DEFAULT_TIMEOUT, **others: Any) -> Any:
        if _is_set(os.environ):
            return from_environment(url, timeout=timeout, **others)
        return rendezvous_by_mpi(timeout)

    handler.is_by_mpi = True  # type: ignore[attr-defined]
    handlers["env"] = handler


def _is_set(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun, or the user, has said where the ranks meet."""
    return "MASTER_ADDR" in environ


# What C++ and Python call by these names, in all versions
_METHODS = [
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather",
    "allgather_coalesced", "all_gather_single", "all_gather_single_coalesced",
    "_allgather_base", "allgather_into_tensor_coalesced", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall",
    "all_to_all_single", "alltoall_base", "gather", "scatter", "send", "recv",
    "recv_anysource", "barrier", "monitored_barrier", "getBackendName", "name",
    "size", "rank", "abort", "shutdown", "setTimeout", "set_timeout",
    "_set_default_timeout", "setSequenceNumberForGroup",
    "getSequenceNumberForGroup", "_set_sequence_number_for_group",
    "_get_sequence_number_for_group",
]  # fmt: skip


def _delegate(base: Any, name: str) -> Any:
    """Return a subclass of a class of PyTorch that calls an `operations` object."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.operations, name)(*args, **kwargs)

        return call

    members: dict[str, Any] = {name: method(name) for name in _METHODS}
    # C++ looks for these in Python's class, where it would find itself without end
    members.update({name: False for name in dir(base) if name.startswith("supports_")})
    return type(name, (base,), members)


def _can_subclass_backend() -> bool:
    """Return whether C++ calls methods of Python's subclasses of `Backend`.

    From 2.14 on; it has no constructor before.
    """
    try:
        type("_Trial", (_BACKEND,), {})(0, 1)
    except TypeError:
        return False
    return True


_BACKEND = getattr(dist, "BackendBase", _c10d.Backend)
_MpiBackend = _delegate(_BACKEND, "MpiBackend") if _can_subclass_backend() else None
_MpiProcessGroup = _delegate(dist.ProcessGroup, "MpiProcessGroup")
_published: dict[Any, Any] = {}  # C++ alone would keep only its part of them


def publish(operations: Any, options: Any, name: str) -> Any:
    """Return operations as what PyTorch expects of a backend.

    Of a `Backend`, C++ forwards only `wait` and `get_future` of works: their
    `is_completed` is never true, and `recv` does not know the sender. So a group with
    this backend alone is a `ProcessGroup` itself.
    """
    keep_untraced()
    rank, size = options.group_rank, options.group_size
    backend = group = None
    if _MpiBackend is not None:
        backend = _MpiBackend(rank, size)
        backend.operations = operations
    if backend is None or _is_alone(name):
        kind_of_group = _NamedProcessGroup if backend is None else _MpiProcessGroup
        group = kind_of_group(
            *(() if backend is None else (options.store,)), rank, size
        )
        group.operations = operations
        if backend is not None:
            kind = dist.ProcessGroup.BackendType.CUSTOM
            group._set_default_backend(kind)
            group._register_backend(torch.device("cpu"), kind, backend)
    _published[operations] = backend, group
    return group or backend


@functools.cache
def keep_untraced() -> None:
    """Exclude this library, which communicates, from what torch.compile traces."""
    from torch._dynamo import trace_rules  # takes long; optimizers import it, too

    # Older versions of PyTorch trace it, with the same results
    if hasattr(trace_rules, "add"):
        trace_rules.add("mpidist")


def withdraw(operations: Any) -> None:
    """Forget operations that were published."""
    _published.pop(operations, None)


def finish_all() -> None:
    """Wait for the operations of all groups."""
    for operations in list(_published):
        operations.finish()


def _is_alone(name: str) -> bool:
    """Return whether the group that is made has this backend only."""
    frame: Any = sys._getframe()
    while frame is not None and "backend_config" not in frame.f_locals:
        frame = frame.f_back
    if frame is None:
        return False
    config = frame.f_locals["backend_config"].get_device_backend_map()
    return set(config.values()) == {name}


class _NamedProcessGroup(_MpiProcessGroup):  # type: ignore[misc, valid-type]
    """A process group whose names C++ does not keep, as it has no `Backend`."""

    group_name = group_desc = ""

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description
