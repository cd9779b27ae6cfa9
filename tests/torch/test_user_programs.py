"""What users do with DistributedDataParallel, beside one process with all rows."""

import copy
import dataclasses
import functools
import warnings

import numpy as np
import pytest

from mpidist.errors import ContextError, MismatchError

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional

from torch_rows import rows_of  # noqa: E402

from mpidist.torch import (  # noqa: E402
    DistributedDataParallel,
    convert_sync_batchnorm,
)


def network(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def wrap(module, strategy, **arguments):
    return DistributedDataParallel(module, strategy, rows=len, **arguments)


def both(strategy, step, alone, count=7, **arguments):
    """Return what `step(model, x, y)` gives over all ranks, and on one process."""
    everything, mine = rows_of(strategy, count)
    model = wrap(copy.deepcopy(alone), strategy, **arguments)
    return step(model, *mine), step(alone, *everything)


def assert_same_gradients(model, alone):
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, msg=name)


def assert_equal_on_all_ranks(strategy, tensors):
    mine = [t.detach().numpy() for t in tensors]
    for others in strategy.gather_objects(mine):
        assert all(np.array_equal(a, b) for a, b in zip(mine, others, strict=True))


class Head(nn.Module):
    """An actor, or a critic, on a trunk that both have."""

    def __init__(self, trunk, outputs):
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(16, outputs)

    def forward(self, x):
        return self.head(torch.tanh(self.trunk(x)))


def test_two_models_with_a_shared_part(strategy):
    def heads():
        torch.manual_seed(0)
        trunk = nn.Linear(6, 16)
        return Head(trunk, 3), Head(trunk, 1)

    def step(actor, critic, x, y):
        F.cross_entropy(actor(x), y).backward()
        critic(x).square().mean().backward()

    alone, plain = heads(), heads()
    everything, mine = rows_of(strategy, 7)
    step(*(wrap(m, strategy) for m in plain), *mine)
    step(*alone, *everything)
    for m, other in zip(plain, alone):
        assert_same_gradients(m, other)


@pytest.mark.mpi(min_size=2)
def test_models_in_another_order_on_a_rank_are_an_error(strategy):
    models = [wrap(network(), strategy) for _ in range(2)]
    _, (x, y) = rows_of(strategy, 7)
    first = models[strategy.extended.replica_id % 2]
    with pytest.raises(MismatchError, match="different models"):
        F.cross_entropy(first(x), y).backward()


def test_a_gradient_that_a_function_leaves_out(strategy):
    class WithoutBias(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight, bias):
            context.save_for_backward(x, weight)
            return x @ weight.T + bias

        @staticmethod
        def backward(context, gradient):
            x, weight = context.saved_tensors
            return gradient @ weight, gradient.T @ x, None

    class Layer(nn.Linear):
        def forward(self, x):
            return WithoutBias.apply(x, self.weight, self.bias)

    def step(model, x, y):
        for _ in range(2):
            F.cross_entropy(model(x), y).backward()
        return model

    torch.manual_seed(0)
    assert_same_gradients(*both(strategy, step, Layer(6, 3)))


Record = dataclasses.make_dataclass("Record", ["output"])


@pytest.mark.parametrize("kind", ["unused", "checkpointed", "record"])
def test_a_static_graph(strategy, kind):
    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
            self.unused = nn.Linear(2, 2) if kind == "unused" else None

        def forward(self, x):
            x = self.first(x)
            if kind == "unused":
                return self.last(x)[:, :3]
            if kind == "record":  # in which PyTorch finds no tensors
                return Record(self.last(x)[:, :3])
            calls = (
                torch.utils.checkpoint.checkpoint(self.last, x, use_reentrant=True)
                for _ in range(2)
            )
            return sum(calls)[:, :3]

    def train(steps, model, x, y):
        for _ in range(steps):
            model.zero_grad()
            output = model(x)
            F.cross_entropy(getattr(output, "output", output), y).backward()
        return model

    for steps in (1, 3):
        step = functools.partial(train, steps)
        found = both(strategy, step, Layers(), static_graph=True)
        assert_same_gradients(*found)


def test_hooks_that_change_gradients_of_this_rank(strategy):
    """They run before the average, as in PyTorch's own class."""

    def clamp(parameter):
        parameter.grad.clamp_(-1e-3, 1e-3)

    def step(model, x, y):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)
        F.cross_entropy(model(x), y).backward()
        return model

    _, mine = rows_of(strategy, 4 * strategy.num_replicas_in_sync)
    model = wrap(network(4000), strategy)
    step(model, *mine)
    clamped = [p.grad.numpy() for p in step(network(4000), *mine).parameters()]
    for found, *others in zip(model.parameters(), *strategy.gather_objects(clamped)):
        torch.testing.assert_close(found.grad.numpy(), np.mean(others, axis=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_mixed_precision_and_an_overflow_on_one_rank(strategy, dtype):
    is_first = strategy.extended.replica_id == 0

    def step(model, x, y):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=2)
        for k in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(x), y)
            if k == 2 and (is_first or not isinstance(model, DistributedDataParallel)):
                loss = loss * 1e38
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        return list(model.parameters()), scaler.get_scale()

    (found, scale), (expected, scale_alone) = both(strategy, step, network(), count=8)
    assert scale == scale_alone
    assert_equal_on_all_ranks(strategy, found)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)


def test_quantization_aware_training(strategy):
    quantization = pytest.importorskip("torch.ao.quantization")
    module = nn.Sequential(
        quantization.QuantStub(), network(), quantization.DeQuantStub()
    )
    module.train()
    with warnings.catch_warnings():  # PyTorch's own
        warnings.simplefilter("ignore")
        module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(module, inplace=True)
    model = wrap(module, strategy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    _, mine = rows_of(strategy, 7)
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(mine[0]), mine[1]).backward()
        optimizer.step()
    assert_equal_on_all_ranks(strategy, model.parameters())


def test_a_second_wrapper_of_one_module(strategy):
    """As in a notebook, where the first one is alive."""
    everything, mine = rows_of(strategy, 7)
    alone, module = network(4000), network(4000)
    wrap(module, strategy)
    first = wrap(module, strategy)
    second = wrap(first.module, strategy)
    F.cross_entropy(second(mine[0]), mine[1]).backward()
    F.cross_entropy(alone(everything[0]), everything[1]).backward()
    assert_same_gradients(module, alone)


def test_buffers_that_a_library_asks_to_ignore(strategy):
    rank = strategy.extended.replica_id
    module = network()
    module.register_buffer("local", torch.tensor(float(rank)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["local"]
    )
    model = wrap(module, strategy)
    model(torch.zeros(2, 6))
    assert model.module.local == rank


def test_parameters_that_a_call_replaces_are_refused(strategy):
    model, (_, (x, y)) = wrap(network(), strategy), rows_of(strategy, 7)

    def gradients(net):
        def loss(parameters):
            return F.cross_entropy(torch.func.functional_call(net, parameters, (x,)), y)

        return torch.func.grad(loss)({n: p.detach() for n, p in net.named_parameters()})

    with pytest.raises(ContextError, match="wrap it again"):
        gradients(model)
    assert list(gradients(model.module))


def test_the_jacobian_of_a_wrapped_model(strategy):
    """That of this rank's rows, without communication."""
    alone, (everything, mine) = network(), rows_of(strategy, 7)
    model = wrap(copy.deepcopy(alone), strategy)
    torch.testing.assert_close(
        torch.func.jacrev(model)(mine[0]), torch.func.jacrev(alone)(mine[0])
    )
    F.cross_entropy(model(mine[0]), mine[1]).backward()
    F.cross_entropy(alone(everything[0]), everything[1]).backward()
    assert_same_gradients(model, alone)


@pytest.mark.mpi(min_size=2)
def test_a_penalty_through_synchronised_batch_norm_is_refused(strategy):
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = wrap(convert_sync_batchnorm(module, strategy), strategy)
    x = rows_of(strategy, 4 * strategy.num_replicas_in_sync)[1][0].requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.square().sum().backward()
