"""DistributedDataParallel: a model of PyTorch, trained on all ranks as on one."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from mpidist.comm.consensus.signatures import CallSignature
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    UnsupportedError,
)
from mpidist.options import CommunicationOptions
from mpidist.strategy.strategy import Strategy
from mpidist.torch import devices
from mpidist.torch.batch_norm import find_strategy
from mpidist.torch.pieces import broadcast
from mpidist.torch.reducer import CALL, Joining, Reducer
from mpidist.util import nest, validation

__all__ = ["DistributedDataParallel"]

# Arguments of torch's own that mean nothing here, and what to do instead
_FOREIGN = {
    "device_ids": "the model stays where it is, and each rank has one",
    "output_device": "the output stays where the model makes it",
    "process_group": "pass strategy=, such as mpidist.MirroredStrategy(communicator=)",
    "device_mesh": "pass strategy=",
    "mixed_precision": "use torch.autocast",
    "delay_all_reduce_named_params": "all gradients are reduced in the same pass",
    "param_to_hook_all_reduce": "all gradients are reduced in the same pass",
}


class DistributedDataParallel(torch.nn.Module):
    """A model whose gradients are averaged over all ranks. Collective to make.

    As torch's class of this name: parameters and buffers become rank 0's; then train as
    on one rank. When `backward` returns, `.grad` holds the mean over the rows of all
    ranks, so ranks may have batches of unlike lengths, or none of the rows: the loss is
    to be the mean over a rank's own rows. Each rank calls `backward` as often as the
    others.

        model = mpidist.torch.DistributedDataParallel(model)
        for x, y in data:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    Args:
      module: the model, where the replica is: on the CPU, or on its GPU ("GPU:1" is
        "cuda:1"); on all ranks with the same parameters.
      strategy: whose ranks; None for the current strategy, or a new one of all ranks.
      broadcast_buffers: whether buffers, such as the means of BatchNorm, become those
        of rank 0 in each step.
      bucket_cap_mb: how many megabytes of gradients at most are sent in one piece where
        they are sent while the pass goes on; None for the default of mpidist.
      find_unused_parameters: whether a pass may leave out parameters; those that it
        leaves out on all ranks keep their `.grad`.
      batch_dim: the dimension of the rows in the first tensor that `forward` gets. The
        gradients of a rank count as much as it has rows (see `set_rows`); None for as
        much as those of any other rank.
      options: see `CommunicationOptions`; compression="bfloat16" sends half as much.
      gradient_as_bucket_view, static_graph: change nothing here.
      **others: torch's other arguments are refused by name.

    Raises, on all ranks:
      MismatchError: names, shapes or dtypes of parameters or buffers differ.
      ArgumentError: no parameter needs a gradient; it is not where the replica is.
      ArgumentTypeError: module is no Module, or other types are wrong.

    Example:
      >>> layer = torch.nn.Linear(1, 1, bias=False)
      >>> model = mpidist.torch.DistributedDataParallel(layer, strategy)
      >>> rank = strategy.extended.replica_id
      >>> x = torch.ones(3 - rank, 1) * (rank + 1.0)  # 3 rows of 1, and 2 rows of 2
      >>> model(x).mean().backward()
      >>> layer.weight.grad  # of all 5 rows
      tensor([[1.4000]])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        strategy: Strategy | None = None,
        *,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        batch_dim: int | None = 0,
        options: CommunicationOptions | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        **others: Any,
    ):
        super().__init__()
        strategy = find_strategy(strategy)
        group = strategy.extended
        consensus = group.consensus
        options = CommunicationOptions() if options is None else options

        def prepare() -> None:
            _refuse_foreign(others)
            validation.instance("options", options, CommunicationOptions)
            if batch_dim is not None:
                validation.integer("batch_dim", batch_dim)
            if bucket_cap_mb is not None:
                validation.number("bucket_cap_mb", bucket_cap_mb, "> 0")
            _check_module(module, group.device)

        consensus.guard(CALL, prepare)
        settings = {
            "broadcast_buffers": bool(broadcast_buffers),
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": bool(find_unused_parameters),
            "batch_dim": batch_dim,
            **vars(options),
        }
        _require_alike(consensus, module, settings)
        broadcast(group, CALL, list(_state(module).values()))
        self.module = module
        self.require_backward_grad_sync = True
        self._strategy, self._batch_dim = strategy, batch_dim
        named = dict(module.named_parameters())
        buffers = dict(module.named_buffers()) if broadcast_buffers else {}
        self._has_buffers = bool(buffers)
        self._reducer = Reducer(
            group,
            {name: p for name, p in named.items() if p.requires_grad},
            buffers,
            {name: p for name, p in named.items() if not p.requires_grad},
            bool(find_unused_parameters),
            options,
            None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20),
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return what the model returns.

        Collective where the buffers have changed in a forward pass before this one that
        no backward pass has followed.
        """
        reducer = self._reducer
        if torch.is_grad_enabled():
            reducer.is_syncing = self.require_backward_grad_sync
            reducer.note_trainer()
            if self._batch_dim is not None:
                rows = _count_rows(inputs, kwargs, self._batch_dim)
                reducer.rows = rows if reducer.is_done else reducer.rows + rows
                reducer.is_done = False
        if self._has_buffers:
            if reducer.has_stale_buffers and self.require_backward_grad_sync:
                reducer.broadcast_buffers()
            reducer.has_stale_buffers |= self.training
        return self.module(*inputs, **kwargs)

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy whose ranks train the model."""
        return self._strategy

    def set_rows(self, rows: int) -> None:
        """Say how many rows the loss of this step is a mean of; after `forward`.

        Where that is not the length of a batch: tokens without padding, say. Not
        collective.

        Raises:
          ArgumentError: less than 0. ArgumentTypeError: no integer.
        """
        self._reducer.rows = validation.integer("rows", rows, 0)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients of passes in this block add up on each rank by itself.

        The first pass behind it averages the sums. As with torch's, it is the block
        that `forward` is called in that counts.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @contextlib.contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks have unlike numbers of batches in this block. Collective.

        A rank that leaves the block takes part in the others' steps without rows, until
        all have left it; then all have the parameters of one that made the most steps
        (but each its own state of the optimizer). Batches of distributed datasets are
        as many on all ranks, and need no such block.

        Args:
          divide_by_initial_world_size: with batch_dim=None, whether ranks that have
            ended count as ranks without gradients; else the others' mean is taken.
          enable: False for a block without effect.
          throw_on_early_termination: raise instead, on all ranks, when one has ended.

        Raises, on all ranks:
          ContextError: see `throw_on_early_termination`.
          DivergenceError: other collectives, such as those of SyncBatchNorm, on ranks
            that have batches left.
        """
        reducer = self._reducer
        if not enable:
            yield
            return
        everywhere = bool(throw_on_early_termination)
        reducer.joining = Joining(bool(divide_by_initial_world_size), everywhere)
        reducer.steps = 0
        try:
            yield
            reducer.follow()
        finally:
            reducer.joining = None

    def register_comm_hook(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: there are no such hooks."""
        raise UnsupportedError(
            f"{CALL} has no communication hooks; pass options="
            "mpidist.CommunicationOptions(compression='bfloat16') to send less"
        )

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            f"a {CALL} belongs to its ranks, and cannot be copied or pickled; take its "
            "`module`, or `state_dict()`"
        )


def _refuse_foreign(others: dict[str, Any]) -> None:
    for name, value in others.items():
        if name not in _FOREIGN:
            raise ArgumentTypeError(f"{CALL} has no argument {name!r}")
        if value is not None:
            raise UnsupportedError(
                f"{CALL}: {name} has no meaning here: {_FOREIGN[name]}"
            )


def _check_module(module: Any, device: str) -> None:
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(
            f"module must be a torch.nn.Module, not {validation.shown(module)}"
        )
    lazy = torch.nn.parameter.UninitializedTensorMixin
    kind, _, index = device.partition(":")
    wanted, other = ("CPU:0", "cpu") if kind == "CPU" else (device, f"cuda:{index}")
    for name, tensor in _state(module).items():
        if isinstance(tensor, lazy):
            raise ArgumentError(
                f"{name} is not initialized; call the model once with some rows first"
            )
        if tensor.is_sparse:
            raise ArgumentError(f"{name} is a sparse tensor; a dense one is needed")
        if devices.place_of(tensor) != wanted:
            raise ArgumentError(
                f"{name} is on {tensor.device}, and this replica on {device}: call "
                f"model.to({other!r}) first, or choose "
                "the replica's device by mpidist.MirroredStrategy(devices=[...])"
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise ArgumentError(f"{CALL} needs a parameter that requires a gradient")


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _require_alike(
    consensus: Any, module: torch.nn.Module, settings: dict[str, Any]
) -> None:
    """Raise on all ranks unless they have made the same model. Collective."""
    state = _state(module)
    needs = {name for name, p in module.named_parameters() if p.requires_grad}
    described = tuple(
        (
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            "with gradient" if name in needs else "without gradient",
        )
        for name, tensor in state.items()
    )
    options = (
        *settings.items(),
        ("the number of parameters and buffers", len(state)),
        ("the names of parameters and buffers", _shortened(", ".join(state))),
    )
    names, spec = nest.flatten({name: name for name in state})
    by_name = dict(zip(state, described))
    leaves = tuple(by_name[name] for name in names)
    consensus.require_same(CallSignature(CALL, options, spec, leaves))


def _shortened(names: str) -> str:
    """Return names for a message, which differ if the names differ."""
    checksum = zlib.crc32(names.encode())
    return names if len(names) < 200 else f"{names[:200]} ... ({checksum:08x})"


def _count_rows(inputs: Any, kwargs: Any, dim: int) -> int:
    """Return the length of the first tensor along a dimension; -1 without a tensor."""
    for value in (*inputs, *kwargs.values()):
        tensor = value if isinstance(value, torch.Tensor) else _first_tensor(value)
        if tensor is not None:
            return int(tensor.shape[dim]) if tensor.ndim > dim else 1
    return -1


def _first_tensor(value: Any) -> Any:
    """Return the first tensor in a nest; None if there is none."""
    if isinstance(value, torch.Tensor):
        return value
    members = value.values() if isinstance(value, dict) else value
    if not isinstance(value, dict | list | tuple):
        return None
    found = (_first_tensor(member) for member in members)
    return next((tensor for tensor in found if tensor is not None), None)
