"""SyncBatchNorm beside torch's BatchNorm on one process with all rows."""

import copy

import numpy as np
import pytest

import mpidist

torch = pytest.importorskip("torch")
nn = torch.nn

from mpidist.torch import (  # noqa: E402 - after the skip
    DistributedDataParallel,
    SyncBatchNorm,
    convert_sync_batchnorm,
)

SHAPES = {1: (), 2: (5,), 3: (4, 3), 4: (2, 3, 2)}


def network(dims, **arguments):
    """Return a model with two such layers between linear maps of the channels."""
    torch.manual_seed(0)
    kind = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][dims - 1]
    without = arguments.pop("without", ())  # bias=False is of newer versions

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = kind(3, **arguments), kind(4, **arguments)
            self.mix = nn.Parameter(torch.randn(4, 3))
            for layer in (self.first, self.second):
                for p in layer.parameters():
                    nn.init.uniform_(p, 0.7, 1.3)
                for name in without:
                    layer.register_parameter(name, None)

        def forward(self, x):
            x = torch.tanh(self.first(x))
            x = torch.einsum("oc,nc...->no...", self.mix, x)
            return self.second(x).flatten(1).pow(3).sum(1)

    return Model()


def shares(strategy, x, kind):
    """Return this rank's rows: even slices, or all on the last rank."""
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    if kind == "last":
        return x if rank == n - 1 else x[:0]
    size = -(-len(x) // n)
    return x[rank * size : (rank + 1) * size]


@pytest.mark.parametrize("dims", SHAPES)
@pytest.mark.parametrize("rows", [(8, "slices"), (5, "slices"), (6, "last")])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"affine": False},
        {"momentum": None, "eps": 0.1},
        {"without": ["bias"]},
        {"without": ["weight"]},
    ],
    ids=str,
)
def test_it_is_batch_norm_of_all_rows(strategy, dims, rows, arguments):
    count, kind = rows
    alone = network(dims, **arguments)
    converted = convert_sync_batchnorm(network(dims, **arguments), strategy)
    assert isinstance(converted.second, SyncBatchNorm)
    model = DistributedDataParallel(converted, strategy, rows=len)
    random = np.random.default_rng(0)
    for _ in range(2):
        x = torch.from_numpy(random.normal(3, 2, (count, 3, *SHAPES[dims]))).float()
        mine = shares(strategy, x, kind).clone().requires_grad_()
        whole = x.clone().requires_grad_()
        model.zero_grad()
        alone.zero_grad()
        got, want = model(mine), alone(whole)
        torch.testing.assert_close(
            strategy.gather(got.detach(), axis=0), want.detach(), rtol=1e-3, atol=1e-4
        )
        got.mean().backward()
        want.mean().backward()
        for name, p in alone.named_parameters():
            q = dict(converted.named_parameters())[name]
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)
        # The input's are of a rank's own mean
        weighed = mine.grad * (len(mine) / count)
        torch.testing.assert_close(
            strategy.gather(weighed, axis=0), whole.grad, rtol=1e-3, atol=1e-4
        )
    for (name, want), got in zip(alone.named_buffers(), converted.buffers()):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=name)
    model.eval()
    alone.eval()
    torch.testing.assert_close(model(mine), alone(mine), rtol=1e-3, atol=1e-4)


def test_too_few_values_are_an_error_on_all_ranks(strategy):
    layer = SyncBatchNorm(3, strategy=strategy)
    rank = strategy.extended.replica_id
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.zeros(1 if rank == 0 else 0, 3))


def test_half_precision_and_a_frozen_input(strategy):
    layer = SyncBatchNorm(3, strategy=strategy, track_running_stats=False)
    layer.to(torch.bfloat16)
    x = torch.randn(4, 3, 2).bfloat16()
    output = layer(x)
    assert output.dtype == torch.bfloat16
    output.float().pow(2).sum().backward()
    assert layer.weight.grad.dtype == torch.bfloat16


def test_conversion_keeps_parameters_and_copies_work(strategy):
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3)))
    weight = model[1][0].weight
    with strategy.scope():
        converted = SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert model[1][0].weight is weight
    assert list(model.state_dict()) == list(copy.deepcopy(model).state_dict())
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        convert_sync_batchnorm(3, strategy)
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(mpidist.ArgumentError, match="2 dimensions"):
            model[1][0](torch.zeros(3))
