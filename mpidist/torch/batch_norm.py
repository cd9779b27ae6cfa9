"""Batch normalisation over the rows of all ranks."""

from __future__ import annotations

import threading
from typing import Any, NoReturn

import torch

from mpidist.context import get_strategy, has_strategy
from mpidist.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from mpidist.strategy.mirrored_strategy import MirroredStrategy
from mpidist.strategy.strategy import Strategy
from mpidist.torch import devices
from mpidist.torch.compat import BatchNorm, keep_untraced
from mpidist.util import validation

_CALL = "SyncBatchNorm"
_CONVERTED = (
    torch.nn.BatchNorm1d,
    torch.nn.BatchNorm2d,
    torch.nn.BatchNorm3d,
    torch.nn.SyncBatchNorm,
)


def find_strategy(strategy: Any) -> Strategy:
    """Return `strategy`; for None the current one, or a new one of all ranks.

    Collective if it creates one.
    """
    if strategy is not None:
        return validation.instance("strategy", strategy, Strategy)
    return get_strategy() if has_strategy() else MirroredStrategy()


class _Ranks:
    def __init__(self, strategy: Strategy):
        self.strategy = strategy

    def __deepcopy__(self, memo: Any) -> _Ranks:
        return self

    def __getstate__(self) -> NoReturn:
        raise UnsupportedError(
            f"a {_CALL} belongs to its ranks, and cannot be pickled; take its "
            "state_dict()"
        )


class SyncBatchNorm(BatchNorm):
    """BatchNorm with means and variances over the rows of all ranks.

    Ranks may have different numbers of rows, or none. With `DistributedDataParallel`,
    gradients are the same as in one process with all rows. In training, forward and
    backward passes are collective. Inputs are `(rows, channels, *shape)`.

    Args:
      num_features, eps, momentum, affine, track_running_stats: as in BatchNorm2d.
      strategy: the strategy; None for the current one, or a new one of all ranks.

    Example:
      >>> layer = mpidist.torch.SyncBatchNorm(1, strategy=strategy)
      >>> rows = torch.full((4, 1), float(strategy.rank))
      >>> output = layer(rows)  # collective
      >>> layer.running_mean  # a tenth of 0.5, the mean over both replicas
      tensor([0.0500])
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        strategy: Strategy | None = None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        keep_untraced()
        self._ranks = _Ranks(find_strategy(strategy))

    @classmethod
    def convert_sync_batchnorm(
        cls, module: Any, strategy: Strategy | None = None
    ) -> Any:
        """See the function `convert_sync_batchnorm`."""
        return convert_sync_batchnorm(module, strategy)

    def _check_input_dim(self, input: Any) -> None:
        if input.dim() < 2:
            raise ArgumentError(
                f"{_CALL} needs an input of at least 2 dimensions, not {input.dim()}"
            )

    def forward(self, input: Any) -> Any:
        """Return the normalised input. Collective in training.

        Raises:
          ArgumentError: on all ranks, if there are fewer than two values per channel.
        """
        group = self._ranks.strategy.extended
        is_training = self.training or self.running_mean is None
        if not is_training or group.num_replicas == 1:
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _Normalise.apply(
            input, self.weight, self.bias, self.eps, group
        )
        if self.training and self.track_running_stats:
            self._track(mean, variance, float(count))
        return output

    def _track(self, mean: Any, variance: Any, count: float) -> None:
        with torch.no_grad():
            self.num_batches_tracked += 1
            rate = self.momentum
            if rate is None:  # cumulative mean
                rate = 1 / float(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
            unbiased = variance * (count / (count - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class _Normalise(torch.autograd.Function):
    """The normalisation in training on several ranks, and its gradient.

    As in https://arxiv.org/abs/1502.03167, with means and variances of all ranks' rows;
    the ranks' variances are combined by the law of total variance.
    """

    @staticmethod
    def forward(
        context: Any, rows: Any, weight: Any, bias: Any, eps: float, group: Any
    ) -> Any:
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        axes = [i for i in range(wide.dim()) if i != 1]
        channels = wide.shape[1]
        count = wide.numel() // max(channels, 1)
        # What the ranks exchange, in one array: number of values, means, variances. Not
        # sums of squares, whose difference would lose the digits of large means
        summary = torch.zeros(1 + 2 * channels, dtype=torch.float64, device=rows.device)
        summary[0] = count
        if count:
            variance, mean = torch.var_mean(wide, axes, correction=0)
            summary[1 : 1 + channels], summary[1 + channels :] = mean, variance
        with devices.on_stream_of(rows):
            array = devices.as_array(summary[None])
            gathered = group.collectives.all_gather(_CALL, array, axis=0)
            summaries = devices.as_tensor(gathered)
        # Combine them: the total variance is the mean variance of the ranks, and the
        # variance of their means
        counts = summaries[:, 0:1]
        total = counts.sum()
        with group.consensus.collective_errors():
            if total < 2:
                raise ArgumentError(
                    f"{_CALL} needs more than 1 value per channel on all ranks "
                    f"together, not an input of {tuple(rows.shape)}"
                )
        means, variances = summaries[:, 1 : 1 + channels], summaries[:, 1 + channels :]
        mean = (counts * means).sum(0) / total
        spread = variances + (means - mean) ** 2
        variance = (counts * spread).sum(0) / total
        scale = (1 / torch.sqrt(variance + eps)).to(wide.dtype)
        shape = [1, channels, *[1] * (wide.dim() - 2)]
        normal = (wide - mean.to(wide.dtype).view(shape)) * scale.view(shape)
        context.save_for_backward(normal, weight, bias, scale)
        context.group, context.axes, context.shape = group, axes, shape
        context.total = float(total)
        context.dtype, context.trainer = rows.dtype, threading.get_ident()
        output = normal
        if weight is not None:
            output = output * weight.view(shape)
        if bias is not None:
            output = output + bias.view(shape)
        context.mark_non_differentiable(mean, variance, total)
        # `normal` is saved for the backward pass, and users may change the output
        output = output.clone() if output is normal else output
        return output.to(rows.dtype), mean, variance, total

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(context: Any, gradient: Any, *_: Any) -> Any:
        normal, weight, bias, scale = context.saved_tensors
        axes, shape, group = context.axes, context.shape, context.group
        wide = gradient.to(normal.dtype)
        sums = torch.stack([wide.sum(axes), (wide * normal).sum(axes)])
        # DistributedDataParallel has weighed each rank's gradients already
        call, wide_sums = f"the backward pass of {_CALL}", sums.double()
        with (
            devices.as_trainer(group, gradient, context.trainer, _CALL),
            devices.on_stream_of(gradient),
        ):
            array = devices.as_array(wide_sums)
            reduced = group.collectives.all_reduce(call, "SUM", array)
            totals = devices.as_tensor(reduced)
        by_input = None
        if context.needs_input_grad[0]:
            means = totals / context.total
            first, second = (m.to(wide.dtype).view(shape) for m in means)
            factor = scale if weight is None else scale * weight.to(scale.dtype)
            by_input = (wide - first - normal * second) * factor.view(shape)
            by_input = by_input.to(context.dtype)
        by_bias, by_weight = (
            None if p is None else own.to(p.dtype)
            for own, p in zip(sums, (bias, weight))
        )
        return by_input, by_weight, by_bias, None, None


def convert_sync_batchnorm(module: Any, strategy: Strategy | None = None) -> Any:
    """Return a model with `SyncBatchNorm` in place of its BatchNorm layers.

    Parameters and buffers are kept. Call it on all ranks, before creating
    `DistributedDataParallel` and the optimizer.

    Args:
      module: changed in place and returned. Its layers stay the same objects.
      strategy: the strategy; None for the current one, or a new one of all ranks.

    Raises:
      ArgumentTypeError: not a Module.
      UnsupportedError: a layer of a subclass of BatchNorm.

    Example:
      >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
      >>> model = mpidist.torch.convert_sync_batchnorm(model, strategy)
      >>> type(model[1]).__name__
      'SyncBatchNorm'
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(
            f"module must be a torch.nn.Module, not {validation.shown(module)}"
        )
    ranks = _Ranks(find_strategy(strategy))
    layers = [m for m in module.modules() if isinstance(m, BatchNorm)]
    for layer in layers:
        if not isinstance(layer, SyncBatchNorm) and type(layer) not in _CONVERTED:
            raise UnsupportedError(
                f"convert_sync_batchnorm: {type(layer).__name__} may compute something "
                "else than BatchNorm, and is not converted"
            )
    for layer in layers:  # they keep their hooks, and all of their places
        if not isinstance(layer, SyncBatchNorm):
            layer.__class__ = SyncBatchNorm
            layer._ranks = ranks
    return module
