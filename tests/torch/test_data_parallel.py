"""DistributedDataParallel, beside the same model on one process with all rows."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import mpidist
from mpidist.comm import bucket_layout

torch = pytest.importorskip("torch")
nn = torch.nn

from mpidist.torch import DistributedDataParallel, reducer  # noqa: E402

MPI_OPTIONS = mpidist.CommunicationOptions(implementation="MPI")


@pytest.fixture(
    params=["node", "nodes", "overlapped", pytest.param("gpu", marks=pytest.mark.gpu)],
    autouse=True,
)
def where(request, monkeypatch):
    """Ranks on one node, on one each, there with a thread that sends buckets; on GPUs.

    Tensors only pass for such on GPUs.
    """
    if request.param == "gpu":
        request.getfixturevalue("tensors_pass_for_cuda")
    elif request.param != "node":
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    if request.param in ("overlapped", "gpu"):
        monkeypatch.setattr(reducer, "_OVERLAP_BYTES", 0)
        monkeypatch.setattr(bucket_layout, "_LEAST_BYTES", 1000)


def network(seed=0, hidden=16):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))


def rows_of(strategy, count, seed=0):
    """Return all rows, and this rank's: slices of ceil(n / ranks)."""
    random = np.random.default_rng(seed)
    x = torch.from_numpy(random.normal(size=(count, 6)).astype("f4"))
    y = torch.from_numpy(random.integers(0, 3, count))
    ranks, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    share = -(-count // ranks)
    mine = slice(rank * share, (rank + 1) * share)
    return (x, y), (x[mine], y[mine])


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def gradients_of(model):
    return {name: p.grad for name, p in model.named_parameters()}


def assert_like_alone(model, alone, **tolerance):
    for name, p in alone.named_parameters():
        got = dict(model.module.named_parameters())[name].grad
        if p.grad is None:
            assert got is None, name
        else:
            torch.testing.assert_close(got, p.grad, **tolerance)


def everyone_equal(strategy, tensors):
    return all(
        len({a.tobytes() for a in strategy.gather_objects(t.detach().numpy())}) == 1
        for t in tensors
    )


@pytest.mark.parametrize("rows", [12, 7, 1])
@pytest.mark.parametrize("hidden", [16, 4000])  # small gradients, and large ones
@pytest.mark.parametrize(
    "options",
    [None, MPI_OPTIONS, mpidist.CommunicationOptions(reproducible=True)],
    ids=["default", "mpi", "reproducible"],
)
def test_gradients_are_those_of_all_rows(strategy, rows, hidden, options):
    everything, mine = rows_of(strategy, rows)
    alone = network(hidden=hidden)
    rank = strategy.extended.replica_id
    model = DistributedDataParallel(
        network(seed=rank, hidden=hidden), strategy, options=options
    )
    for _ in range(3):
        model.zero_grad()
        alone.zero_grad()
        loss_of(model, *mine).backward()
        loss_of(alone, *everything).backward()
        assert_like_alone(model, alone)
        assert everyone_equal(strategy, [p.grad for p in model.parameters()])


def test_training_is_that_of_one_process(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    optimizers = [
        torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, alone)
    ]
    for step in range(10):
        everything, mine = rows_of(strategy, 5 + step, seed=step)
        for m, rows, optimizer in zip((model, alone), (mine, everything), optimizers):
            optimizer.zero_grad()
            loss_of(m, *rows).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
    for got, want in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(got, want)
    assert everyone_equal(strategy, model.parameters())


def test_parameters_and_buffers_become_those_of_rank_0(strategy):
    rank = strategy.extended.replica_id

    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
        model[0].to(memory_format=torch.channels_last)
        model[1].running_mean += seed + 1
        model[1].num_batches_tracked += seed
        model.register_buffer("mask", torch.tensor([seed > 0, True, False]))
        model.register_parameter("scale", nn.Parameter(torch.ones(1).bfloat16() + seed))
        return model

    model = DistributedDataParallel(make(rank), strategy)
    for name, want in make(0).state_dict().items():
        assert torch.equal(model.state_dict()[f"module.{name}"], want), name


def test_a_state_dict_has_the_names_of_torch_and_comes_back(strategy):
    model = DistributedDataParallel(network(), strategy)
    names = [f"module.{name}" for name in network().state_dict()]
    state = model.state_dict()
    assert list(state) == names
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    model.module.load_state_dict(network().state_dict())
    assert everyone_equal(strategy, model.parameters())


@pytest.mark.parametrize("set_to_none", [True, False])
def test_passes_without_sync_add_up(strategy, set_to_none):
    model, alone = DistributedDataParallel(network(), strategy), network()
    for step in range(2):
        for m in (model, alone):
            m.zero_grad(set_to_none=set_to_none)
        parts = [rows_of(strategy, 8, seed=10 * step + k) for k in range(3)]
        with model.no_sync():
            for _, mine in parts[:2]:
                loss_of(model, *mine).backward()
        own = [p.grad.clone() for p in model.parameters()]
        if strategy.num_replicas_in_sync > 1:
            assert not everyone_equal(strategy, own)
        loss_of(model, *parts[2][1]).backward()
        for everything, _ in parts:
            loss_of(alone, *everything).backward()
        assert_like_alone(model, alone)


def test_the_block_around_forward_counts_for_no_sync(strategy):
    model = DistributedDataParallel(network(), strategy)
    _, mine = rows_of(strategy, 8)
    with model.no_sync():
        loss = loss_of(model, *mine)
    loss.backward()
    if strategy.num_replicas_in_sync > 1:
        assert not everyone_equal(strategy, [model.module[0].weight.grad])


class Branches(nn.Module):
    """Uses one of two layers; a third one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.idle = (nn.Linear(6, 3) for _ in range(3))

    def forward(self, x, is_left):
        return self.left(x) if is_left else self.right(x)


def test_an_unused_parameter_is_an_error_on_all_ranks(strategy):
    rank = strategy.extended.replica_id
    model = DistributedDataParallel(Branches(), strategy, batch_dim=None)
    _, (x, y) = rows_of(strategy, 8)
    if rank == 0:
        loss = nn.functional.cross_entropy(model(x, True), y)
    else:  # all are used on the other ranks
        loss = sum(
            nn.functional.cross_entropy(layer(x), y)
            for layer in model.module.children()
        )
    with pytest.raises(ValueError, match=r"right.weight.*find_unused_parameters=True"):
        loss.backward()


def test_parameters_that_some_ranks_use(strategy):
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    model = DistributedDataParallel(Branches(), strategy, find_unused_parameters=True)
    alone = Branches()
    for seed in range(3):
        model.zero_grad()
        alone.zero_grad()
        (x, y), mine = rows_of(strategy, 4 * n, seed)
        nn.functional.cross_entropy(model(mine[0], rank == 0), mine[1]).backward()
        outputs = torch.cat([alone(x[:4], True), alone(x[4:], False)])
        nn.functional.cross_entropy(outputs, y).backward()
        if n == 1:
            assert model.module.right.weight.grad is None
            alone.right.zero_grad()
        assert_like_alone(model, alone)
        assert model.module.idle.weight.grad is None


def test_a_rank_that_uses_all_and_one_that_does_not(strategy):
    rank = strategy.extended.replica_id
    model = DistributedDataParallel(
        Branches(), strategy, batch_dim=None, find_unused_parameters=True
    )
    _, (x, y) = rows_of(strategy, 8)
    layers = list(model.module.children())
    output = model(x, True) if rank else sum(layer(x) for layer in layers)
    nn.functional.cross_entropy(output, y).backward()
    assert everyone_equal(strategy, [p.grad for p in model.parameters()])


def test_shared_and_frozen_parameters(strategy):
    def make():
        model = network(hidden=6)
        model.append(nn.Linear(3, 6, bias=False))
        model.append(model[0])  # the same layer once more
        model[2].bias.requires_grad_(False)
        return model

    everything, mine = rows_of(strategy, 9)
    model, alone = DistributedDataParallel(make(), strategy), make()
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)
    # Frozen later: it needs no gradient any more
    for m in (model.module, alone):
        m.zero_grad()
        m[2].weight.requires_grad_(False)
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


def test_a_parameter_that_is_thawed_is_an_error_on_all_ranks(strategy):
    module = network()
    module[0].weight.requires_grad_(False)
    model = DistributedDataParallel(module, strategy)
    if strategy.extended.replica_id == 0:
        module[0].weight.requires_grad_(True)
    _, mine = rows_of(strategy, 8)
    with pytest.raises(RuntimeError, match=r"0\.weight.*requires_grad"):
        loss_of(model, *mine).backward()


def replace_a_layer(module):
    module[2] = nn.Linear(16, 3)


def add_a_layer(module):
    module.append(nn.Linear(3, 3))


def replace_a_parameter(module):
    module[0].weight = nn.Parameter(module[0].weight.detach().clone())


def assign_a_state_dict(module):
    module.load_state_dict(network().state_dict(), assign=True)
    module.requires_grad_()


@pytest.mark.parametrize(
    "change", [replace_a_layer, add_a_layer, replace_a_parameter, assign_a_state_dict]
)
@pytest.mark.parametrize("is_on_all", [True, False])
def test_parameters_that_are_added_or_replaced_are_an_error_on_all_ranks(
    strategy, change, is_on_all
):
    model = DistributedDataParallel(network(), strategy, find_unused_parameters=True)
    if is_on_all or strategy.extended.replica_id == 0:
        change(model.module)
    _, mine = rows_of(strategy, 8)
    with pytest.raises(RuntimeError, match="added or replaced after"):
        loss_of(model, *mine).backward()


def test_changes_that_need_no_gradients_are_no_error(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    everything, mine = rows_of(strategy, 8)
    for module in (model.module, alone):
        module.teacher = network().requires_grad_(False)
        module.append(nn.Identity())
        del module.teacher  # nn.Sequential would call it
        torch.nn.utils.parametrize.register_parametrization(
            module[0], "weight", nn.Tanh(), unsafe=True
        )
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


@pytest.mark.parametrize("finds_unused", [True, False])
def test_a_parameter_that_one_rank_freezes_is_an_error_on_all(strategy, finds_unused):
    ranks, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    if ranks == 1:
        pytest.skip("of several ranks")
    model = DistributedDataParallel(
        network(), strategy, find_unused_parameters=finds_unused
    )
    if rank == ranks - 1:
        model.module[0].weight.requires_grad_(False)
    _, mine = rows_of(strategy, 8)
    with pytest.raises(ValueError, match=r"0\.weight requires no gradient on rank"):
        loss_of(model, *mine).backward()


def test_a_model_of_a_temporary_object(strategy):
    module, alone = network(), network()
    everything, mine = rows_of(strategy, 8)
    loss = loss_of(DistributedDataParallel(module, strategy), *mine)
    loss.backward()
    loss_of(alone, *everything).backward()
    for p, q in zip(module.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "complex64"])
def test_gradients_of_each_dtype(strategy, dtype):
    dtype = getattr(torch, dtype)
    ranks = strategy.num_replicas_in_sync
    layer = nn.Linear(5, 1, bias=False, dtype=dtype)
    model = DistributedDataParallel(layer, strategy, batch_dim=None)
    random = np.random.default_rng(0)
    everyone = torch.from_numpy(random.normal(size=(ranks, 5))).to(dtype)
    model(everyone[strategy.extended.replica_id, None]).sum().abs().backward()
    got = layer.weight.grad
    assert got.dtype == dtype
    if not dtype.is_complex and ranks < 3:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        outputs = (everyone * layer.weight.detach()).sum(1)
        signs = [-1 if v < 0 else 1 for v in outputs.tolist()]
        want = sum(s * x.to(wide) / ranks for s, x in zip(signs, everyone))
        assert torch.equal(got[0], want.to(dtype))  # rounded once


def test_sums_of_half_precision_are_formed_in_float32(strategy):
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    layer = nn.Linear(1, 1, bias=False, dtype=torch.float16)
    model = DistributedDataParallel(layer, strategy, batch_dim=None)
    # Their sum is above the largest float16, their mean is not
    model(torch.full((1, 1), 60000.0, dtype=torch.float16)).sum().backward()
    assert layer.weight.grad.item() == torch.tensor(60000.0).half().item()
    assert n > 0 <= rank


def test_a_rank_without_rows_adds_nothing_whatever_its_gradient(strategy):
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    model, alone = DistributedDataParallel(network(), strategy), network()
    (x, y), _ = rows_of(strategy, 4)
    is_last = rank == n - 1
    mine = (x, y) if is_last else (x[:0], y[:0])  # the mean of no losses is nan
    loss_of(model, *mine).backward()
    loss_of(alone, x, y).backward()
    assert_like_alone(model, alone)


def test_rows_that_the_user_counts(strategy):
    rank = strategy.extended.replica_id
    model, alone = DistributedDataParallel(network(), strategy), network()
    (x, y), (mine_x, mine_y) = rows_of(strategy, 12)
    weights = torch.arange(12) % 3 > 0  # padding
    share = len(mine_x)
    kept = weights[rank * share : (rank + 1) * share]

    def loss(model, x, y, kept):
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        return (losses * kept).sum() / kept.sum()

    value = loss(model, mine_x, mine_y, kept)
    model.set_rows(int(kept.sum()))
    value.backward()
    loss(alone, x, y, weights).backward()
    assert_like_alone(model, alone)
    for wrong, kind in ((-1, ValueError), ("3", TypeError)):
        with pytest.raises(kind, match="rows"):
            model.set_rows(wrong)


def test_rows_along_another_dimension_and_none(strategy):
    ranks, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    torch.manual_seed(0)
    layers = [nn.Linear(6, 1, bias=False) for _ in range(2)]
    by_rows = DistributedDataParallel(layers[0], strategy, batch_dim=1)
    by_rank = DistributedDataParallel(layers[1], strategy, batch_dim=None)
    x = torch.ones(4, rank + 1, 6) * (rank + 1)
    for model in (by_rows, by_rank):
        model(input=x).mean().backward()
    counts = [r + 1 for r in range(ranks)]
    weighted = sum(c * c for c in counts) / sum(counts)
    torch.testing.assert_close(layers[0].weight.grad, torch.full((1, 6), weighted))
    mean = sum(counts) / ranks
    torch.testing.assert_close(layers[1].weight.grad, torch.full((1, 6), mean))


def test_rows_that_one_rank_cannot_count_are_an_error_on_all(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("there is nothing to weigh")

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, value):
            return (self.weight * value).sum()

    model = DistributedDataParallel(Constant(), strategy)
    model(2.0).backward()  # no rank can: each counts the same
    assert model.module.weight.grad.tolist() == [2, 2]
    is_first = strategy.extended.replica_id == 0
    loss = model(torch.ones(2) if is_first else 1.0)
    with pytest.raises(ValueError, match=r"no tensor whose rows .* rank"):
        loss.backward()


def test_gradients_are_changed_in_place_and_old_ones_are_left_alone(strategy):
    model = DistributedDataParallel(network(hidden=4000), strategy)
    _, mine = rows_of(strategy, 8)
    loss_of(model, *mine).backward()
    parameters = list(model.parameters())
    held = [p.grad for p in parameters]
    copies = [g.clone() for g in held]
    model.zero_grad()  # which drops them
    loss_of(model, *rows_of(strategy, 8, seed=1)[1]).backward()
    for gradient, want in zip(held, copies):
        assert torch.equal(gradient, want)
    held = [p.grad for p in parameters]
    model.zero_grad(set_to_none=False)
    loss_of(model, *mine).backward()
    assert all(p.grad is g for p, g in zip(parameters, held))
    assert all(torch.equal(g, want) for g, want in zip(held, copies))


def test_a_pass_that_an_exception_ends_on_one_rank(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("of several ranks")
    rank = strategy.extended.replica_id
    model, alone = DistributedDataParallel(network(), strategy), network()
    everything, mine = rows_of(strategy, 8)

    def fail(_):
        raise ZeroDivisionError("a hook of the user's")

    loss = loss_of(model, *mine)
    if rank == 0:
        handle = model.module[0].weight.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        loss = loss_of(model, *mine)
    with pytest.raises(mpidist.DivergenceError, match="after 1 backward pass"):
        loss.backward()
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        loss_of(model, *mine).backward()
        loss_of(alone, *everything).backward()
        assert_like_alone(model, alone)


def test_a_pass_that_an_exception_ends_in_run_is_its_error_on_all(strategy):
    rank = strategy.extended.replica_id
    model, alone = DistributedDataParallel(network(), strategy), network()
    everything, mine = rows_of(strategy, 8)
    calls = []

    def fail(_):
        calls.append(1)
        if rank == 0 and len(calls) == 1:
            raise ZeroDivisionError("a hook of the user's")

    model.module[0].weight.register_hook(fail)

    def step():
        model.zero_grad()
        loss_of(model, *mine).backward()

    with pytest.raises(ZeroDivisionError):
        strategy.run(step)
    strategy.run(step)
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


def test_a_pass_that_exceptions_end_on_all_ranks_is_forgotten(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    everything, mine = rows_of(strategy, 8)

    def fail(_):
        raise ZeroDivisionError("a hook of the user's")

    handle = model.module[0].weight.register_hook(fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loss_of(model, *mine).backward()
    handle.remove()
    model.zero_grad()
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


def test_another_call_meanwhile_is_an_error_that_names_both(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("of several ranks")
    model = DistributedDataParallel(network(), strategy)
    _, mine = rows_of(strategy, 8)
    with pytest.raises(
        mpidist.DivergenceError, match=r"gradients of Distr.*reduce"
    ) as raised:
        if strategy.extended.replica_id == 0:
            loss_of(model, *mine).backward()
        else:
            strategy.reduce("SUM", 1.0)
    assert str(raised.value).count(__file__) == 2  # not PyTorch's own files


@pytest.mark.parametrize("broadcasts", [True, False])
def test_buffers_follow_rank_0(strategy, broadcasts):
    rank = strategy.extended.replica_id

    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))

    model = DistributedDataParallel(make(), strategy, broadcast_buffers=broadcasts)
    first = make()  # that of rank 0, with its rows
    _, mine = rows_of(strategy, 8 * strategy.num_replicas_in_sync)
    shares = strategy.gather_objects(mine[0].numpy())
    for step in range(2):
        loss_of(model, *mine).backward()
        first(torch.from_numpy(shares[0]))
        norm = model.module[1]
        if broadcasts or rank == 0:
            assert torch.equal(norm.running_mean, first[1].running_mean)
            assert torch.equal(norm.running_var, first[1].running_var)
        else:
            assert not torch.equal(norm.running_mean, first[1].running_mean)
        assert norm.num_batches_tracked == step + 1
    if broadcasts:  # passes without gradients change them, too
        for _ in range(2):
            with torch.no_grad():
                model(mine[0])
            first(torch.from_numpy(shares[0]))
        model.eval()
        model(mine[0])
        assert torch.equal(norm.running_mean, first[1].running_mean)
        assert model(mine[0]).requires_grad  # no collective: nothing has changed


def test_models_that_differ_are_an_error_on_all_ranks(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("of several ranks")
    is_first = strategy.extended.replica_id == 0
    renamed = network()
    renamed.register_parameter("other", nn.Parameter(torch.zeros(1)))
    frozen = network()
    frozen[0].weight.requires_grad_(False)
    for other, text in [
        (network(hidden=8), r"0\.(weight|bias).*\(8"),
        (renamed, "number of parameters"),
        (frozen, r"0\.weight.*without gradient"),
        (network().double(), r"0\.(weight|bias).*float64"),
    ]:
        with pytest.raises(ValueError, match=text):
            DistributedDataParallel(network() if is_first else other, strategy)
    with pytest.raises(ValueError, match="find_unused_parameters is"):
        DistributedDataParallel(network(), strategy, find_unused_parameters=is_first)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"module": 3}, TypeError, "torch.nn.Module, not 3"),
        ({"module": nn.ReLU()}, ValueError, "requires a gradient"),
        ({"module": nn.LazyLinear(3)}, ValueError, "weight is not initialized"),
        ({"device_ids": [0]}, NotImplementedError, "device_ids has no meaning"),
        ({"process_group": 1}, NotImplementedError, "process_group .* strategy="),
        ({"proces_group": 1}, TypeError, "no argument 'proces_group'"),
        ({"batch_dim": "rows"}, TypeError, "batch_dim"),
        ({"options": {}}, TypeError, "CommunicationOptions"),
    ],
)
def test_arguments_that_make_no_sense(strategy, arguments, kind, text):
    with pytest.raises(kind, match=text):
        DistributedDataParallel(
            **{"module": network(), "strategy": strategy, **arguments}
        )
    # On one rank alone it is an error on all, too
    if strategy.extended.replica_id > 0:
        arguments = {}
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises(kind, match=text):
            DistributedDataParallel(
                **{"module": network(), "strategy": strategy, **arguments}
            )


def test_arguments_of_torch_that_change_nothing(strategy):
    DistributedDataParallel(
        network(),
        strategy,
        device_ids=None,
        process_group=None,
        gradient_as_bucket_view=True,
        static_graph=True,
        bucket_cap_mb=1,
    )


def test_what_is_refused_by_name(strategy):
    model = DistributedDataParallel(network(), strategy)
    with pytest.raises(NotImplementedError, match="`module`"):
        copy.deepcopy(model)
    with pytest.raises(NotImplementedError, match="compression"):
        model.register_comm_hook(None, print)
    copy.deepcopy(model.module)
    with pytest.raises(NotImplementedError, match="convert_sync_batchnorm"):
        DistributedDataParallel(
            nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3)), strategy
        )
    with pytest.raises(ValueError, match="on meta"):
        DistributedDataParallel(network().to("meta"), strategy)


def test_a_sparse_gradient_is_an_error_on_all_ranks(strategy):
    model = DistributedDataParallel(nn.Embedding(4, 2, sparse=True), strategy)
    with pytest.raises(TypeError, match=r"gradient of parameter weight is sparse"):
        model(torch.tensor([1, 2])).sum().backward()


def test_a_dtype_that_is_changed_later_is_an_error(strategy):
    model = DistributedDataParallel(network(), strategy)
    model.double()
    (x, y), _ = rows_of(strategy, 4)
    with pytest.raises(TypeError, match=r"float64, but was torch\.float32"):
        loss_of(model, x.double(), y).backward()


class Checkpointed(nn.Module):
    """A network that computes outputs of its layers a second time, in backward."""

    def __init__(self, reentrant, times=1):
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), network()
        self.last = nn.Linear(3, 3)
        self.reentrant, self.times = reentrant, times

    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        x = self.first(x)
        made = [
            checkpoint(self.layers, x, use_reentrant=self.reentrant)
            for _ in range(self.times)
        ]
        return self.last(sum(made))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers(strategy, reentrant):
    torch.manual_seed(0)
    model, alone = Checkpointed(reentrant), Checkpointed(False)
    alone.load_state_dict(model.state_dict())
    model = DistributedDataParallel(model, strategy)
    everything, mine = rows_of(strategy, 7)
    for _ in range(2):
        loss_of(model, *mine).backward()
        loss_of(alone, *everything).backward()
        assert_like_alone(model, alone)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_the_whole_model(strategy, reentrant):
    from torch.utils.checkpoint import checkpoint

    model, alone = DistributedDataParallel(network(), strategy), network()
    (x, y), (mine_x, mine_y) = rows_of(strategy, 7)
    mine_x.requires_grad_()
    output = checkpoint(model, mine_x, use_reentrant=reentrant)
    nn.functional.cross_entropy(output, mine_y).backward()
    loss_of(alone, x, y).backward()
    assert_like_alone(model, alone)


def test_layers_in_two_checkpoints_have_their_gradients_twice(strategy):
    _, mine = rows_of(strategy, 4)
    model = DistributedDataParallel(Checkpointed(True, 2), strategy)
    with pytest.raises(RuntimeError, match=r"two gradients.*use_reentrant=False"):
        loss_of(model, *mine).backward()


def test_a_pass_inside_a_pass_is_an_error_by_name(strategy):
    _, mine = rows_of(strategy, 4)
    model = DistributedDataParallel(network(), strategy)
    loss = loss_of(model, *mine)
    inner = loss_of(model, *mine)
    handles = []

    def begin_inner(_):
        handles.pop().remove()
        inner.backward()

    handles.append(model.module[0].weight.register_hook(begin_inner))
    with pytest.raises(RuntimeError, match="inside another one"):
        loss.backward()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        pass_without_outputs(model, *mine).backward()


def pass_without_outputs(model, x, y):
    """Return a loss whose backward pass contains another one: not by `model(x)`."""
    from torch.utils.checkpoint import checkpoint

    layers = model.module
    x = x.clone().requires_grad_()
    return nn.functional.cross_entropy(
        layers[2](checkpoint(layers[:2], x, use_reentrant=True)), y
    )


@pytest.mark.parametrize("kept", [False, True])
def test_rows_of_a_forward_pass_that_is_in_no_loss_do_not_count(strategy, kept):
    model, alone = DistributedDataParallel(network(), strategy), network()
    everything, mine = rows_of(strategy, 7)
    outputs = []
    if strategy.extended.replica_id == 0:  # validates, without torch.no_grad()
        model.eval()
        outputs.append(model(everything[0]))
        model.train()
    if not kept:
        outputs.clear()
    if kept and begins_early(model):  # it sends before all of the loss is known
        with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
            loss_of(model, *mine).backward()
        return
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


def test_rows_of_passes_that_wait_for_their_backward(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    counts = (12, 24) if begins_early(model) else (7, 3)
    steps = [rows_of(strategy, count, count) for count in counts]
    losses = [loss_of(model, *mine) for _, mine in steps]
    for loss, (everything, _) in zip(losses, steps):
        model.zero_grad()
        alone.zero_grad()
        loss.backward()
        loss_of(alone, *everything).backward()
        assert_like_alone(model, alone)


def begins_early(model):
    return model._reducer._overlap is not None


def test_torch_autograd_grad_is_of_this_rank_alone(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    everything, mine = rows_of(strategy, 7)
    if strategy.extended.replica_id == 0:
        x = everything[0].clone().requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        torch.autograd.grad(model(x).sum(), list(model.parameters()))
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


def test_a_penalty_of_the_gradient(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    everything, mine = rows_of(strategy, 7)
    for m, (x, y) in ((model, mine), (alone, everything)):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        penalty = slope.pow(2).sum(1).mean()
        (loss_of(m, x, y) + penalty).backward()
    assert_like_alone(model, alone)


def test_a_pass_that_an_exception_ends_before_any_gradient(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("of several ranks")
    model = DistributedDataParallel(network(), strategy)
    _, mine = rows_of(strategy, 8)

    def fail(_):
        raise ZeroDivisionError("a hook of the user's")

    loss = loss_of(model, *mine)
    if strategy.extended.replica_id == 0:
        output = model(mine[0])
        output.register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
    with pytest.raises(mpidist.DivergenceError, match="exceptions ended"):
        loss.backward()


def test_passes_within_and_outside_no_sync_may_overlap(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    parts = [rows_of(strategy, 12, seed) for seed in range(2)]
    with model.no_sync():
        first = loss_of(model, *parts[0][1])
    second = loss_of(model, *parts[1][1])
    first.backward()
    second.backward()
    for everything, _ in parts:
        loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


def test_several_forward_passes_before_one_backward(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    parts = [rows_of(strategy, 8, seed) for seed in range(2)]
    sum(loss_of(model, *mine) for _, mine in parts).backward()
    sum(loss_of(alone, *everything) for everything, _ in parts).backward()
    assert_like_alone(model, alone)


def test_two_passes_through_one_graph(strategy):
    model, alone = DistributedDataParallel(network(), strategy), network()
    everything, mine = rows_of(strategy, 8)
    for m, rows in ((model, mine), (alone, everything)):
        loss = loss_of(m, *rows)
        loss.backward(retain_graph=True)
        m.zero_grad()
        loss.backward()
    assert_like_alone(model, alone)


def test_a_model_of_the_current_strategy(strategy):
    with strategy.scope():
        model = DistributedDataParallel(network())
    assert model._strategy is strategy


def test_compression_sends_bfloat16(strategy):
    options = mpidist.CommunicationOptions(compression="bfloat16")
    model = DistributedDataParallel(network(), strategy, options=options)
    alone = network()
    everything, mine = rows_of(strategy, 8)
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone, rtol=0.02, atol=0.01)


def batches_of(strategy, counts):
    """Return the batches of each rank, as many as `counts` says for it."""
    random = np.random.default_rng(0)
    return [
        [
            (
                torch.from_numpy(random.normal(size=(4, 6)).astype("f4")),
                torch.from_numpy(random.integers(0, 3, 4)),
            )
            for _ in range(counts[rank % len(counts)])
        ]
        for rank in range(strategy.num_replicas_in_sync)
    ]


@pytest.mark.parametrize("counts", [(2, 4), (3, 1), (0, 2), (2, 2)])
@pytest.mark.parametrize("divides", [None, True, False])
def test_ranks_with_unlike_numbers_of_batches_join(strategy, counts, divides):
    """`divides`: None where ranks count by rows, else divide_by_initial_world_size."""
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id

    def make():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=1.0), nn.Linear(6, 3)
        )

    everyone = batches_of(strategy, counts)
    batch_dim = 0 if divides is None else None
    model = DistributedDataParallel(make(), strategy, batch_dim=batch_dim)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join(divide_by_initial_world_size=divides is not False):
        for x, y in everyone[rank]:
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
    alone = make()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(max(map(len, everyone))):
        there = [batches[step] for batches in everyone if step < len(batches)]
        optimizer.zero_grad()
        losses = [loss_of(alone, x, y) for x, y in there]
        (sum(losses) / (n if divides else len(losses))).backward()
        optimizer.step()
        with torch.no_grad():
            alone(there[0][0])  # whose means all ranks get
    for got, want in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(got, want)
    state = list(model.state_dict().values())
    assert everyone_equal(strategy, state)


def test_early_termination_is_an_error_if_asked_for(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("of several ranks")
    model = DistributedDataParallel(network(), strategy)
    own = batches_of(strategy, (2, 1))[strategy.extended.replica_id]
    with (
        pytest.raises(RuntimeError, match=r"rank.* ran out"),
        model.join(throw_on_early_termination=True),
    ):
        for x, y in own:
            loss_of(model, x, y).backward()


def test_unlike_numbers_of_batches_are_an_error_without_join(strategy):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("of several ranks")
    model = DistributedDataParallel(network(), strategy)
    own = batches_of(strategy, (2, 1))[strategy.extended.replica_id]
    with pytest.raises(mpidist.DivergenceError, match=r"gradients of Distr.*barrier"):
        for x, y in own:
            loss_of(model, x, y).backward()
        strategy.barrier()
    with model.join(enable=False):
        loss_of(model, *own[0]).backward()
