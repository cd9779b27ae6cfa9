"""DistributedDataParallel, beside the same model on one process with all rows."""

import collections
import contextlib
import copy
import inspect
import io

import numpy as np
import pytest

import mpidist

torch = pytest.importorskip("torch")
nn = torch.nn

from torch_rows import loss_of, rows_of  # noqa: E402

from mpidist.torch import (  # noqa: E402
    DistributedDataParallel,
    as_tensors,
    data_parallel,
)

dist, checkpoint = torch.distributed, torch.utils.checkpoint.checkpoint
BROADCAST_BUFFERS = next(  # its name in this version of PyTorch
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(nn.parallel.DistributedDataParallel).parameters
)


@pytest.fixture(params=["node", "nodes"], autouse=True)
def where(request, monkeypatch):
    """Ranks on one node, and on one each."""
    if request.param == "nodes":
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")


def wrap(module, strategy, **arguments):
    return DistributedDataParallel(module, strategy, rows=len, **arguments)


def network(seed=0, hidden=16):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 3))


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
def test_gradients_are_those_of_all_rows(strategy, rows, hidden):
    everything, mine = rows_of(strategy, rows)
    alone = network(hidden=hidden)
    rank = strategy.extended.replica_id
    model = wrap(network(seed=rank, hidden=hidden), strategy)
    for _ in range(3):
        model.zero_grad()
        alone.zero_grad()
        loss_of(model, *mine).backward()
        loss_of(alone, *everything).backward()
        assert_like_alone(model, alone)
        assert everyone_equal(strategy, [p.grad for p in model.parameters()])


def test_training_is_that_of_one_process(strategy):
    model, alone = wrap(network(), strategy), network()
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

    model = wrap(make(rank), strategy)
    for name, want in make(0).state_dict().items():
        assert torch.equal(model.state_dict()[f"module.{name}"], want), name


def test_a_state_dict_has_the_names_of_torch_and_comes_back(strategy):
    model = wrap(network(), strategy)
    names = [f"module.{name}" for name in network().state_dict()]
    state = model.state_dict()
    assert list(state) == names
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    model.module.load_state_dict(network().state_dict())
    assert everyone_equal(strategy, model.parameters())


def test_the_block_around_forward_counts_for_no_sync(strategy):
    model = wrap(network(), strategy)
    _, mine = rows_of(strategy, 8)
    with model.no_sync():
        loss = loss_of(model, *mine)
    loss.backward()
    if strategy.num_replicas_in_sync > 1:
        assert not everyone_equal(strategy, [model.module[0].weight.grad])


def test_an_unused_parameter_is_an_error_in_its_backward_pass(strategy):
    module = nn.Linear(6, 3)
    module.register_module("idle", nn.Linear(6, 3))
    model = wrap(module, strategy)
    _, mine = rows_of(strategy, 8)
    with pytest.raises(RuntimeError, match="find_unused_parameters=True"):
        loss_of(model, *mine).backward()


def assign_a_state_dict(module):
    module.load_state_dict(network().state_dict(), assign=True)
    module.requires_grad_()


def freeze(module):
    module[0].weight.requires_grad_(False)


@pytest.mark.parametrize("change", [assign_a_state_dict, freeze])
def test_parameters_that_change_after_wrapping_are_an_error(strategy, change):
    module = network()
    finds = change is not freeze
    model = wrap(module, strategy, find_unused_parameters=finds)
    change(module)
    _, mine = rows_of(strategy, 8)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="wrap it again"):
            loss_of(model, *mine)


CASTS = {
    "to another dtype": lambda module: module.double(),
    "there and back": lambda module: module.half().float(),
    "a layer there and back": lambda module: module[2].double().float(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("finds_unused", [True, False])
@pytest.mark.parametrize("is_synced", [True, False])
def test_a_cast_after_wrapping_is_an_error(strategy, cast, finds_unused, is_synced):
    model = wrap(network(), strategy, find_unused_parameters=finds_unused)
    _, (x, y) = rows_of(strategy, 8)
    loss_of(model, x, y).backward()
    model.to(torch.float32)  # that changes nothing
    loss_of(model, x, y).backward()
    CASTS[cast](model.module)
    x = x.to(next(model.parameters()).dtype)
    with (
        pytest.raises(mpidist.ContextError, match="cast or moved"),
        contextlib.nullcontext() if is_synced else model.no_sync(),
    ):
        loss_of(model, x, y).backward()


@pytest.mark.parametrize("finds_unused", [True, False])
def test_a_critic_accumulates_after_it_was_frozen(strategy, finds_unused):
    """PyTorch's reducer still waits for the gradients of the frozen pass."""
    model = wrap(network(), strategy, find_unused_parameters=finds_unused)
    alone = network()
    (x, _), (mine, _) = rows_of(strategy, 7)
    model.requires_grad_(False)
    model(mine.clone().requires_grad_()).square().mean().backward()
    model.requires_grad_(True)
    with model.no_sync():
        model(mine).square().mean().backward()
    if strategy.num_replicas_in_sync > 1:
        assert not everyone_equal(strategy, [model.module[0].weight.grad])
    model(mine).exp().mean().backward()
    alone(x).square().mean().backward()
    alone(x).exp().mean().backward()
    assert_like_alone(model, alone)


def test_a_model_of_a_temporary_object(strategy):
    module, alone = network(), network()
    everything, mine = rows_of(strategy, 8)
    loss = loss_of(wrap(module, strategy), *mine)
    loss.backward()
    loss_of(alone, *everything).backward()
    for p, q in zip(module.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_rank_without_rows_adds_nothing_whatever_its_gradient(strategy):
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    model, alone = wrap(network(), strategy), network()
    (x, y), _ = rows_of(strategy, 4)
    is_last = rank == n - 1
    mine = (x, y) if is_last else (x[:0], y[:0])  # the mean of no losses is nan
    loss_of(model, *mine).backward()
    loss_of(alone, x, y).backward()
    assert_like_alone(model, alone)


def test_numbers_of_rows_that_make_no_sense(strategy):
    model = wrap(network(), strategy)
    for wrong, kind in ((-1, ValueError), ("3", TypeError)):
        with pytest.raises(kind, match="rows"):
            model.set_rows(wrong)


@pytest.mark.mpi(min_size=2)
def test_another_call_meanwhile_is_an_error_that_names_both(strategy):
    model = wrap(network(), strategy)
    _, mine = rows_of(strategy, 8)
    with pytest.raises(
        mpidist.DivergenceError,
        match=r"backward pass of Distr.*reduce|reduce.*backward pass",
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

    model = wrap(make(), strategy, **{BROADCAST_BUFFERS: broadcasts})
    first = make()  # that of rank 0, with its rows
    _, mine = rows_of(strategy, 8 * strategy.num_replicas_in_sync)
    shares = strategy.gather_objects(mine[0].numpy())
    for _ in range(2):
        loss_of(model, *mine).backward()
        first(torch.from_numpy(shares[0]))
    model.eval()
    model(mine[0])
    norm = model.module[1]
    is_equal = torch.equal(norm.running_mean, first[1].running_mean)
    assert is_equal == (broadcasts or rank == 0)
    assert torch.equal(norm.num_batches_tracked, torch.tensor(2))


@pytest.mark.mpi(min_size=2)
def test_models_that_differ_are_an_error_on_all_ranks(strategy):
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
        wrap(network(), strategy, find_unused_parameters=is_first)


def conjugate():
    layer = nn.Linear(2, 2, dtype=torch.complex64)
    layer.bias = nn.Parameter(layer.bias.detach().conj())
    return layer


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"module": 3}, TypeError, "torch.nn.Module, not 3"),
        ({"module": nn.ReLU()}, ValueError, "requires a gradient"),
        ({"module": nn.LazyLinear(3)}, ValueError, "weight is not initialized"),
        ({"proces_group": 1}, TypeError, "no argument 'proces_group'"),
        ({"batch_dim": 0}, TypeError, "rows=len"),
        ({"options": {}}, TypeError, "bf16_compress_hook"),
        ({"rows": 3}, TypeError, "function or 'equal'"),
        ({"reduction": "max"}, ValueError, "'mean' or 'sum'"),
        ({"module": nn.SyncBatchNorm(3)}, NotImplementedError, "convert_sync_batch"),
        ({"module": nn.Embedding(4, 2, sparse=True)}, NotImplementedError, "sparse"),
        ({"module": nn.Embedding(4, 2, max_norm=1.0)}, NotImplementedError, "max_norm"),
        ({"module": nn.Linear(2, 2, device="meta")}, ValueError, "on meta"),
        ({"module": conjugate()}, ValueError, "bias is a conjugate view"),
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


class Checkpointed(nn.Module):
    """A network that computes outputs of its layers a second time, in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers, self.last = nn.Linear(6, 6), network(), nn.Linear(3, 3)

    def forward(self, x):
        made = checkpoint(self.layers, self.first(x), use_reentrant=True)
        return self.last(made)


def test_reentrantly_checkpointed_layers(strategy):
    model, alone = wrap(Checkpointed(), strategy), Checkpointed()
    everything, mine = rows_of(strategy, 7)
    for _ in range(2):
        loss_of(model, *mine).backward()
        loss_of(alone, *everything).backward()
        assert_like_alone(model, alone)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_of_the_whole_model(strategy, reentrant):
    model, alone = wrap(network(), strategy), network()
    (x, y), (mine_x, mine_y) = rows_of(strategy, 7)
    mine_x.requires_grad_()
    output = checkpoint(model, mine_x, use_reentrant=reentrant)
    nn.functional.cross_entropy(output, mine_y).backward()
    loss_of(alone, x, y).backward()
    assert_like_alone(model, alone)


def test_gradients_by_torch_autograd_grad_are_not_averaged(strategy):
    model, alone = wrap(network(), strategy), network()
    everything, mine = rows_of(strategy, 7)
    x = mine[0].clone().requires_grad_()
    (got,) = torch.autograd.grad(model(x).sum(), x)
    x = mine[0].clone().requires_grad_()
    (want,) = torch.autograd.grad(alone(x).sum(), x)
    torch.testing.assert_close(got, want)
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


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
    rows = len if divides is None else "equal"
    model = DistributedDataParallel(make(), strategy, rows=rows)
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


@pytest.mark.mpi(min_size=2)
def test_early_termination_is_an_error_if_asked_for(strategy):
    model = wrap(network(), strategy)
    own = batches_of(strategy, (2, 1))[strategy.extended.replica_id]
    with (
        pytest.raises(RuntimeError, match=r"exhausted (all )?inputs"),
        model.join(throw_on_early_termination=True),
    ):
        for x, y in own:
            loss_of(model, x, y).backward()


def assert_trains_like_alone(strategy, model, alone, loss, rows=7):
    """Compare gradients of two steps, where `loss(model, x, y)` may be anything."""
    for step in range(2):
        everything, mine = rows_of(strategy, rows, seed=step)
        model.zero_grad()
        alone.zero_grad()
        loss(model, *mine)
        loss(alone, *everything)
        assert_like_alone(model, alone)


class Holder:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


OUTPUTS = {
    "distribution": lambda y: torch.distributions.Categorical(logits=y),
    "beside": lambda y: (torch.distributions.Categorical(logits=y), y),
    "nested": lambda y: {"a": [Holder({"b": [Holder(y)]})], "c": y},
    "set": lambda y: {y},
    "queue": lambda y: collections.deque([y]),
    "function": lambda y: (y, lambda: y.sum()),
    "iterator": lambda y: (y, iter([y])),
}


class Returns(nn.Linear):
    def __init__(self, kind):
        super().__init__(6, 3)
        self.kind, self.kept, self.many = kind, None, []

    def forward(self, x):
        output = super().forward(getattr(x, "held", x))
        if self.kind == "attribute":
            self.kept = {"penalty": output.square().mean()}
        elif self.kind == "buffer":
            self.register_buffer("running", output.sum())
        elif self.kind == "list":
            self.many.append(Holder(output))
        return OUTPUTS.get(self.kind, lambda y: y)(output)


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("arguments", [{"rows": len}, {"reduction": "sum"}, {}])
def test_outputs_that_are_no_tensors(strategy, kind, arguments):
    model = DistributedDataParallel(Returns(kind), strategy, **arguments)
    if model._weight == 1:  # one rank
        return
    _, (x, y) = rows_of(strategy, 8)
    for _ in range(2):
        with pytest.raises(mpidist.UnsupportedError, match="rows='equal'"):
            model(x)
    with torch.no_grad():
        model(x)
    model = DistributedDataParallel(Returns("distribution"), strategy, rows="equal")
    (-model(x).log_prob(y).mean()).backward()


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["attribute", "buffer", "list"])
def test_results_that_a_model_keeps(strategy, kind):
    _, (x, _) = rows_of(strategy, 8)
    for arguments in ({"rows": len}, {"reduction": "sum"}):
        model = DistributedDataParallel(Returns(kind), strategy, **arguments)
        if model._weight != 1:
            name = {"attribute": "kept", "buffer": "_buffers", "list": "many"}[kind]
            with pytest.raises(mpidist.UnsupportedError, match=rf"'{name}'.*detach"):
                model(x)
    for arguments in ({"rows": "equal"}, {}):
        DistributedDataParallel(Returns(kind), strategy, **arguments)(x)
    wrap(nn.utils.weight_norm(Returns("none")), strategy)(x)


def test_inputs_that_are_no_tensors(strategy):
    _, (x, _) = rows_of(strategy, 8)
    model = wrap(Returns("none"), strategy)
    model._rows = lambda x: len(getattr(x, "held", x))
    model(Holder(x))
    with pytest.raises(mpidist.UnsupportedError, match=r"has an input .*Holder"):
        model(Holder(x.clone().requires_grad_()))


def test_outputs_that_are_changed_in_place(strategy):
    def loss(model, x, y):
        output = model(x)
        output *= 2
        nn.functional.cross_entropy(output, y).backward()

    assert_trains_like_alone(strategy, wrap(network(), strategy), network(), loss)


def test_a_penalty_alone(strategy):
    def loss(model, x, y):
        del y
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.pow(2).sum(1).mean().backward()

    def network_without_bias_at_the_end():
        module = network()
        module[2] = nn.Linear(16, 1, bias=False)
        torch.nn.init.constant_(module[2].weight, 0.5)
        return module

    model = wrap(network_without_bias_at_the_end(), strategy)
    alone = network_without_bias_at_the_end()
    assert_trains_like_alone(strategy, model, alone, loss)


def test_a_forward_pass_that_is_dropped_leaves_nothing(strategy):
    model, alone = wrap(network(), strategy), network()
    everything, mine = rows_of(strategy, 7)
    if strategy.extended.replica_id == 0:
        model(everything[0])
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


def test_rows_that_are_not_stated(strategy, monkeypatch):
    lines = []
    monkeypatch.setattr(data_parallel.logs, "info", lambda _, text: lines.append(text))
    model = DistributedDataParallel(network(), strategy)
    n, rank = strategy.num_replicas_in_sync, strategy.extended.replica_id
    _, mine = rows_of(strategy, 4 * n)
    for _ in range(2):
        loss_of(model, *mine).backward()
    assert len(lines) == 1
    if n > 1:
        loss = loss_of(model, *(t[rank:] for t in mine))
        with pytest.raises(ValueError, match="unlike first dimensions"):
            loss.backward()
        model = DistributedDataParallel(network(), strategy)
        loss = loss_of(model, *mine)
        if rank == 0:
            model.set_rows(4)
        with pytest.raises(ValueError, match="stated no rows"):
            loss.backward()


@pytest.mark.parametrize("rows", [7, 9])
def test_inputs_that_look_like_a_batch_of_something_else(strategy, rows):
    n = strategy.num_replicas_in_sync
    others = mpidist.Dataset.range(rows * n - 1).batch(rows * n)
    batches = iter(as_tensors(strategy.experimental_distribute_dataset(others)))
    # On the last rank as many as an input has columns, or as nothing has
    assert len(next(batches)) == rows - (strategy.rank == n - 1)
    everything, mine = rows_of(strategy, rows * n)
    model, alone = DistributedDataParallel(network(), strategy), network()
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


def test_losses_that_are_divided_by_the_global_batch(strategy):
    def loss(model, x, y):
        total = nn.functional.cross_entropy(model(x), y, reduction="sum")
        (total / 7).backward()

    model = DistributedDataParallel(network(), strategy, reduction="sum")
    assert_trains_like_alone(strategy, model, network(), loss)


def test_a_backward_pass_that_the_user_finalizes(strategy):
    def loss(model, x, y):
        loss_of(model, x, y).backward()
        if isinstance(model, DistributedDataParallel):
            model.finalize_backward()

    model = wrap(network(), strategy)
    if not hasattr(model, "finalize_backward"):
        pytest.skip("from PyTorch 2.15 on")
    model.require_manual_backward_finalization = True
    assert_trains_like_alone(strategy, model, network(), loss)


def test_gradients_that_do_not_come_by_the_outputs_are_an_error(strategy):
    model = wrap(network(), strategy)
    _, mine = rows_of(strategy, 8)
    with pytest.raises(RuntimeError, match=r"call model\(\.\.\.\) itself"):
        loss_of(model.module, *mine).backward()
    again = wrap(model.module, strategy)  # the earlier one does not mind
    loss_of(again, *mine).backward()


def test_a_buffer_that_is_replaced_follows_rank_0(strategy):
    class Running(nn.Linear):
        def forward(self, x):
            self.mean = self.mean + x.mean().detach()
            return super().forward(x)

    module = Running(6, 3)
    module.register_buffer("mean", torch.zeros(()))
    model = wrap(module, strategy)
    _, (x, y) = rows_of(strategy, 8)
    for _ in range(3):
        loss_of(model, x, y).backward()
    model.eval()(x[:0])
    state = strategy.gather_objects(float(module.mean.nan_to_num(0)))
    assert len(set(state)) == 1


def test_it_is_what_other_libraries_look_for(strategy):
    model = wrap(network(), strategy)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    _, mine = rows_of(strategy, 8)
    loss_of(model, *mine).backward()
    other = copy.deepcopy(model)
    loss_of(other, *mine).backward()
    torch.save(model.module, io.BytesIO())
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

    # Before 2.14 PyTorch knows this name only, and refuses the hook for other backends
    model.register_comm_hook(
        None, lambda state, bucket: hooks.bf16_compress_hook(state, bucket)
    )
    alone = network()
    everything, mine = rows_of(strategy, 8)
    model.zero_grad()
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone, rtol=0.02, atol=0.01)


def test_a_strategy_and_a_process_group_of_one_rank(strategy):
    group = wrap(network(), strategy).process_group
    both = {"process_group": group} if strategy.extended.replica_id == 0 else {}
    with pytest.raises(ValueError, match="not both"):
        DistributedDataParallel(network(), strategy, **both)


def test_one_row_for_a_batch_norm_is_explained(strategy):
    model = wrap(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), strategy)
    with pytest.raises(ValueError, match="convert_sync_batchnorm"):
        model(torch.ones(1, 6))


def test_a_default_group_of_another_backend_is_not_used(strategy, comm, tmp_path):
    folder = comm.bcast(str(tmp_path))
    store = dist.FileStore(f"{folder}/store", comm.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)
    model, alone = wrap(network(), strategy), network()
    assert dist.get_backend(model.process_group) == "mpidist"
    assert wrap(network(), strategy).process_group is model.process_group
    everything, mine = rows_of(strategy, 7)
    loss_of(model, *mine).backward()
    loss_of(alone, *everything).backward()
    assert_like_alone(model, alone)


@pytest.mark.mpi(min_size=2)
def test_a_group_that_one_rank_has_ended_is_an_error_on_all(strategy):
    wrap(network(), strategy)
    if strategy.extended.replica_id == 0:
        dist.destroy_process_group()
    with pytest.raises(mpidist.MismatchError, match="is_initialized"):
        wrap(network(), strategy)


def test_rows_of_a_batch_that_another_one_has_as_its_width(strategy):
    """Two iterators are at a batch; one has as many rows as the other has columns."""
    (x, y), _ = rows_of(strategy, 7)
    ranks = strategy.num_replicas_in_sync
    wide = mpidist.Dataset.range(6 * ranks).batch(6 * ranks)
    rows = mpidist.Dataset.from_tensor_slices((x, y)).batch(7)
    other, data = (
        iter(as_tensors(strategy.experimental_distribute_dataset(d)))
        for d in (wide, rows)
    )
    next(other)
    model, alone = DistributedDataParallel(network(), strategy), network()
    loss_of(model, *next(data)).backward()
    loss_of(alone, x, y).backward()
    assert_like_alone(model, alone)


class Averaging(nn.Module):
    """Keeps means of its rows in a parameter, as the layers of Keras do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.mean = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.calls = nn.Parameter(torch.zeros((), dtype=int), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            self.mean.copy_(x.mean(0))
            self.calls.add_(1)
        return self.layer(x)


def test_what_ranks_change_on_their_own_is_named_once(comm, strategy, caplog):
    caplog.set_level("INFO", "mpidist.torch")
    model = DistributedDataParallel(Averaging(), strategy, rows="equal")
    for _ in range(2):
        model(torch.ones(2, 3) * comm.rank).sum().backward()
    said = [r.getMessage() for r in caplog.records if "changes" in r.getMessage()]
    assert len(said) == (comm.size > 1)
    assert all("changes module.mean, which" in text for text in said)
