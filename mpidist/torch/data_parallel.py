"""DistributedDataParallel: data-parallel training of a PyTorch model."""

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
from mpidist.torch.c10d import keep_untraced
from mpidist.torch.parameters import CALL, Parameters
from mpidist.torch.passes import Joining, count_rows
from mpidist.torch.pieces import broadcast
from mpidist.torch.reducer import Reducer
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
    """A model whose gradients are averaged over all ranks. Collective to create.

    Like torch's class of this name: parameters and buffers are copied from rank 0; then
    train as on one rank. The loss must be the mean over a rank's own rows. When
    `backward` returns, `.grad` is the mean over the rows of all ranks, so ranks may
    have batches of different lengths, or no rows. All ranks must call `backward`
    equally often. What `torch.autograd.grad` returns is of this rank alone.

        model = mpidist.torch.DistributedDataParallel(model)
        for x, y in data:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    Args:
      module: the model, on the replica's device (the CPU, or its GPU: "GPU:1" is
        "cuda:1"), with the same parameters on all ranks.
      strategy: the strategy; None for the current one, or a new one of all ranks.
      broadcast_buffers: whether buffers, such as the means of BatchNorm, are copied
        from rank 0 in each step.
      bucket_cap_mb: the maximum megabytes of gradients per bucket when gradients are
        sent during the backward pass; None for mpidist's default.
      find_unused_parameters: whether a pass may omit parameters; those omitted on all
        ranks keep their `.grad`.
      batch_dim: the dimension of the rows in the first tensor that `forward` gets. A
        rank's gradients are weighted by its number of rows (see `set_rows`); with None
        all ranks have the same weight.
      options: see `CommunicationOptions`; compression="bfloat16" sends half as much.
      gradient_as_bucket_view, static_graph: accepted, without effect.
      **others: torch's other arguments are refused by name.

    Raises, on all ranks:
      MismatchError: names, shapes or dtypes of parameters or buffers differ.
      ArgumentError: no parameter requires a gradient; the model is on another device.
      ArgumentTypeError: `module` is not a Module; another argument has an invalid type.

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
        keep_untraced()
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
        buffers = dict(module.named_buffers()) if broadcast_buffers else {}
        self._has_buffers = bool(buffers)
        self._reducer = Reducer(
            group,
            Parameters(module),
            buffers,
            bool(find_unused_parameters),
            options,
            None if bucket_cap_mb is None else int(bucket_cap_mb * 2**20),
        )

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the output of the model.

        Collective if an earlier forward pass without a backward pass has changed
        buffers.
        """
        reducer = self._reducer
        if self._has_buffers:
            if reducer.has_stale_buffers and self.require_backward_grad_sync:
                reducer.broadcast_buffers()
            reducer.has_stale_buffers |= self.training
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        dim = self._batch_dim
        rows = -1 if dim is None else count_rows(inputs, kwargs, dim)
        output = self.module(*inputs, **kwargs)
        reducer.note_forward(output, rows, self.require_backward_grad_sync)
        return output

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy whose ranks train the model."""
        return self._strategy

    def set_rows(self, rows: int) -> None:
        """Set the number of rows in this step's mean loss; call it after `forward`.

        Use it if that is not the length of the batch, for example tokens without
        padding. Not collective.

        Raises:
          ArgumentError: below 0. ArgumentTypeError: not an integer.
        """
        self._reducer.set_rows(validation.integer("rows", rows, 0))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank in this block, without communication.

        The first pass after the block averages the sums. As in torch, the block that
        contains `forward` counts.
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
        """Allow different numbers of batches on the ranks in this block. Collective.

        A rank that leaves the block takes part in the other ranks' steps without rows,
        until all have left. Then all ranks get the parameters of a rank with the most
        steps (each keeps its own optimizer state). Distributed datasets have the same
        number of batches on all ranks and do not need it.

        Args:
          divide_by_initial_world_size: with batch_dim=None, whether ended ranks count
            in the mean, with zero gradients; else the mean is over the other ranks.
          enable: False for a block without effect.
          throw_on_early_termination: instead raise on all ranks when one has ended.

        Raises, on all ranks:
          ContextError: see `throw_on_early_termination`.
          DivergenceError: ranks with batches left call other collectives, such as those
            of SyncBatchNorm.
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
        """Not supported: raises."""
        raise UnsupportedError(
            f"{CALL} has no communication hooks; pass options="
            "mpidist.CommunicationOptions(compression='bfloat16') to send less"
        )

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            f"a {CALL} belongs to its ranks, and cannot be copied or pickled; use its "
            "`module` or `state_dict()`"
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
    for name, layer in module.named_modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            raise UnsupportedError(
                f"{name or 'module'} is a torch.nn.SyncBatchNorm, which synchronises "
                "the ranks of torch.distributed; use "
                "mpidist.torch.convert_sync_batchnorm(model)"
            )
    if not any(p.requires_grad for p in module.parameters()):
        raise ArgumentError(f"{CALL} needs a parameter that requires a gradient")


def _state(module: torch.nn.Module) -> dict[str, Any]:
    """Return parameters and buffers by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _require_alike(
    consensus: Any, module: torch.nn.Module, settings: dict[str, Any]
) -> None:
    """Raise on all ranks unless their models are the same. Collective."""
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
