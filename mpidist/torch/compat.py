"""The private parts of PyTorch that this room needs, and what differs by version.

All were tried on PyTorch 2.13, 2.14 and 2.15. Two private methods are overridden where
they belong, in `data_parallel`: `_check_global_requires_backward_grad_sync`, which
PyTorch's class calls for ranks that have ended (`Join`), and `_sync_buffers`.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from mpidist.errors import UnsupportedError

# Of autograd: the number of this thread's backward pass, or -1; what runs at its end
current_task: Callable[[], int] = torch._C._current_graph_task_id
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
# Whether functions are transformed, as by torch.func.grad
are_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
# What adds up the gradient of a parameter, and what runs now in a backward pass.
# PyTorch averages in the former, which a parameter loses by another dtype or device
current_node: Callable[[], Any] = torch._C._current_autograd_node


def accumulator_of(parameter: Any) -> Any:
    """Return the node that adds up the gradient of a parameter."""
    return parameter.view_as(parameter).grad_fn.next_functions[0][0]


BatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm

DEFAULT_TIMEOUT = dist.distributed_c10d.default_pg_timeout
all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_OPS = {int(op.value): name for name, op in dist.ReduceOp.RedOpType.__members__.items()}

# Not whether there is a GPU: CUDA would start, before a rank has chosen its GPU
_DEVICES = [
    torch.device(kind)
    for kind in ("cpu", "cuda")
    if kind == "cpu" or torch.backends.cuda.is_built()
]
_FOLDER = os.path.dirname(__file__) + os.sep
# Where Python calls C++'s backward pass
_AUTOGRAD = {
    torch.autograd.__file__,
    torch.autograd.graph.__file__,
    torch.nn.parallel.distributed.__file__,  # for ranks that have ended, in `Join`
}


def name_of(op: Any) -> str:
    """Return the name of a reduction, such as "SUM"."""
    name: str = _OPS[int(op.op if hasattr(op, "op") else op)]
    return name


def may_wait(opts: Any, is_short: bool) -> bool:
    """Return whether an operation may run in the thread that calls it.

    That thread will wait for it at once. DistributedDataParallel's reducer in C++ does
    not, but need not go on meanwhile, where another thread would gain nothing.
    """
    if getattr(opts, "asyncOp", True) is False:
        return True
    return is_short and is_of_reducer()


def is_of_reducer() -> bool:
    """Return whether C++ calls, in a backward pass: DistributedDataParallel's part."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _AUTOGRAD


def tables_of(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and the modules of a module itself, which may change."""
    return module._parameters, module._modules


def ignored_names(module: torch.nn.Module) -> Any:
    """Return the parameters and buffers that DistributedDataParallel leaves alone."""
    return getattr(module, "_ddp_params_and_buffers_to_ignore", ())


def prepare_backward(model: Any, outputs: list[Any]) -> None:
    """Let PyTorch's reducer expect another backward pass, as a forward pass does."""
    model.reducer._rebuild_buckets()
    model.reducer.prepare_for_backward(outputs)


def reduce_static_graph(model: Any) -> None:
    """Let PyTorch reduce at the end of the first backward pass of a static graph.

    It does that itself for outputs in which it finds tensors: not in dataclasses.
    """
    if model.static_graph and not model._static_graph_delay_allreduce_enqueued:
        model._static_graph_delay_allreduce_enqueued = True
        queue_callback(model.reducer._delay_all_reduce)


def is_mean_of_present(model: Any) -> bool:
    """Return whether PyTorch averages over the ranks that have not ended, in `Join`."""
    return bool(model._join_config.enable and not model._divide_by_initial_world_size)


def has_group(group: Any) -> bool:
    """Return whether a process group is in use."""
    return group is not None and group in dist.distributed_c10d._world.pg_map


def find_device(group: Any) -> str:
    """Return where a small tensor for a group may be: NCCL has no memory of the CPU."""
    return "cpu" if torch.device("cpu") in group._device_types else "cuda"


def factor_of(op: Any) -> Any:
    """Return the factor of PREMUL_SUM."""
    return op.__getstate__()[1]


def seconds_of(opts: Any, of_group: datetime.timedelta | None) -> float | None:
    """Return an operation's timeout in seconds; None for PyTorch's default.

    Args:
      opts: of the operation, or its timeout, or None.
      of_group: holds where `opts` has none.
    """
    timeout = getattr(opts, "timeout", opts)
    is_set = isinstance(timeout, datetime.timedelta) and timeout > datetime.timedelta()
    timeout = timeout if is_set else of_group
    return None if timeout in (None, DEFAULT_TIMEOUT) else timeout.total_seconds()


def register(
    name: str,
    create: Callable[[Any, Any], Any],
    rendezvous: Callable[..., Iterator[Any]],
) -> None:
    """Make a backend known, and a rendezvous where the environment has none."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(
            name, create, extended_api=True, devices=[d.type for d in _DEVICES]
        )
    # A module that is hidden by its function of the same name
    module = importlib.import_module("torch.distributed.rendezvous")
    handlers = module._rendezvous_handlers
    from_environment = handlers["env"]
    if getattr(from_environment, "is_by_mpi", False):
        return

    def handler(
        url: str, timeout: datetime.timedelta = DEFAULT_TIMEOUT, **others: Any
    ) -> Any:
        # As torchrun sets them, or the user; arguments are in the URL
        of_url = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
        rank, size = (
            of_url.get(name, os.environ.get(name.upper()))
            for name in ("rank", "world_size")
        )
        if "MASTER_ADDR" in os.environ and rank is not None:
            return from_environment(url, timeout=timeout, **others)
        return rendezvous(timeout, asked=(_number(rank), _number(size)))

    handler.is_by_mpi = True  # type: ignore[attr-defined]
    handlers["env"] = handler


@functools.cache
def refuse_builtin_hook(name: str) -> None:
    """Refuse the hook of C++ for float16 where tensors go through a backend.

    It asserts that futures hold C++'s lists of tensors, which Python cannot make.
    """
    model: Any = torch.nn.parallel.DistributedDataParallel
    register = model._register_builtin_comm_hook

    def check_and_register(self: Any, comm_hook_type: Any) -> None:
        of_float16 = dist.BuiltinCommHookType.FP16_COMPRESS
        config = str(dist.get_backend_config(self.process_group))
        if comm_hook_type == of_float16 and f"{self.device_type}:{name}" in config:
            raise UnsupportedError(
                f"the built-in hook FP16_COMPRESS does not work over {name!r}; use "
                "model.register_comm_hook(None, torch.distributed.algorithms."
                "ddp_comm_hooks.default_hooks.fp16_compress_hook)"
            )
        register(self, comm_hook_type)

    model._register_builtin_comm_hook = check_and_register


def _number(text: Any) -> int | None:
    """Return what PyTorch passes for a rank or a size; it has -1 for unstated."""
    return None if text in (None, "-1") else int(text)


@functools.cache
def _delegate(base: Any, operations: Any) -> Any:
    """Return a subclass of a class of PyTorch that calls its attribute `operations`."""

    def method(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(self.operations, name)(*args, **kwargs)

        return call

    members: dict[str, Any] = {
        name: method(name)
        for name, value in vars(operations).items()
        if callable(value)
        and name[:2] != "__"
        and (name[0] != "_" or hasattr(base, name))
    }
    # C++ looks for these in Python's class, where it would find itself without end
    members.update({name: False for name in dir(base) if name.startswith("supports_")})
    return type(f"Mpi{base.__name__}", (base,), members)


_Backend = getattr(dist, "BackendBase", torch._C._distributed_c10d.Backend)


@functools.cache
def _can_subclass_backend() -> bool:
    """Return whether C++ calls methods of Python's subclasses of `Backend`.

    From 2.14 on; it has no constructor before.
    """
    try:
        type("_Trial", (_Backend,), {})(0, 1)
    except TypeError:
        return False
    return True


def backends_of_gpus(name: str) -> str:
    """Return the backends of a job on GPUs, where `name` is that of tensors on CPUs."""
    return f"cpu:{name},cuda:nccl" if _can_subclass_backend() else "nccl"


@functools.cache
def complete_works() -> None:
    """Let works of this backend end beside others: C++ knows only their futures."""
    work: Any = dist.Work
    is_completed = work.is_completed

    def ask_future(self: Any) -> bool:
        if is_completed(self):
            return True
        try:
            return type(self) is dist.Work and bool(self.get_future().done())
        except RuntimeError:  # one without
            return False

    work.is_completed = ask_future


_published: dict[Any, Any] = {}  # C++ alone would keep only its part of them


def publish(operations: Any, options: Any, name: str) -> Any:
    """Return operations as what PyTorch expects of a backend.

    Of a `Backend`, C++ forwards only `wait` and `get_future` of works: their
    `is_completed` is never true, and `recv` does not know the sender. So a group with
    this backend alone is a `ProcessGroup` itself.
    """
    keep_untraced()
    rank, size = options.group_rank, options.group_size
    kind: Any = type(operations)
    is_alone, backend, group = _is_alone(name), None, None
    if _can_subclass_backend():
        backend = _delegate(_Backend, kind)(rank, size)
        backend.operations = operations
    elif not is_alone:
        raise UnsupportedError(
            f"PyTorch {torch.__version__} can use the backend {name} alone only; "
            "together with others, as in 'cpu:mpidist,cuda:nccl', from 2.14 on"
        )
    if not is_alone:
        complete_works()
    else:
        kind = _delegate(dist.ProcessGroup, kind)
        if backend is None:
            group = type(kind.__name__, (_Named, kind), {})(rank, size)
        else:
            group = kind(options.store, rank, size)
            custom = dist.ProcessGroup.BackendType.CUSTOM
            group._set_default_backend(custom)
            for device in _DEVICES:
                group._register_backend(device, custom, backend)
        group.operations = operations
    _published[operations] = backend, group
    return group or backend


@functools.cache
def keep_untraced() -> None:
    """Exclude this library, which communicates, from what torch.compile traces."""
    from torch._dynamo import trace_rules  # takes long; optimizers import it, too

    trace_rules.add("mpidist")


@functools.cache
def before_futures_wait(serve: Callable[[Any], None]) -> None:
    """Call a function before a future is waited for: in C++, the GIL is released.

    Whoever waits there cannot do what the future waits for.
    """
    future: Any = torch._C.Future
    wait = future.wait

    def serve_and_wait(self: Any) -> Any:
        serve(self)
        return wait(self)

    future.wait = serve_and_wait


def finish_all() -> None:
    """Wait for the operations of all groups."""
    for operations in list(_published):
        operations.finish()


def withdraw(operations: Any) -> None:
    """Forget operations that were published."""
    _published.pop(operations, None)


def _is_alone(name: str) -> bool:
    """Return whether the group that is made has this backend only."""
    # Of its callers: a frame that holds itself would keep all their variables, groups
    # of other backends among them, whose threads must end before the interpreter
    frame: Any = sys._getframe(1)
    while frame is not None and "backend_config" not in frame.f_locals:
        frame = frame.f_back
    if frame is None:
        return False
    config = frame.f_locals["backend_config"].get_device_backend_map()
    return set(config.values()) == {name}


class _Named:
    """What C++ does not know of a process group without a `Backend`."""

    group_name = group_desc = ""
    _device_types = _DEVICES

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description
