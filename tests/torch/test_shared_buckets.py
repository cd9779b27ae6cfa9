"""Large gradients, which all ranks of a node add up where they lie."""

import copy
import gc

import numpy as np
import pytest

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional

import torch_rows  # noqa: E402

from mpidist.errors import ArgumentError, MismatchError  # noqa: E402
from mpidist.torch import DistributedDataParallel, process_group  # noqa: E402
from mpidist.torch.process_group import group_of  # noqa: E402

WIDTH = 20_000  # of which a layer's gradients exceed what travels with a comparison
STEPS = 7  # memory is shared from the fourth on


@pytest.fixture
def counted(strategy, monkeypatch):
    """The calls that added gradients in shared memory, on this rank."""
    transport, calls = group_of(strategy).operations._in_node, []
    if transport is None:
        pytest.skip("one rank needs no memory of the node")
    before = transport.allreduce_in_place

    def call(everyone, deadline):
        calls.append(everyone[0].size)
        before(everyone, deadline)

    monkeypatch.setattr(transport, "allreduce_in_place", call)
    return calls


def network(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    layers = nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)
    return nn.Sequential(*layers).to(dtype)


def rows_of(strategy, step):
    """Return the rows of all ranks in a step, and this rank's."""
    return torch_rows.rows_of(strategy, 4 * strategy.num_replicas_in_sync, step)


def train(model, batches):
    """Return the gradients of each step."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.05), []
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
        optimizer.step()
        found.append([p.grad.clone() for p in model.parameters()])
    return found


def check(strategy, model, alone, steps=range(STEPS)):
    wholes, parts = zip(*(rows_of(strategy, step) for step in steps))
    found, expected = train(model, parts), train(alone, wholes)
    torch.testing.assert_close(found, expected)
    for p in model.parameters():
        everyone = strategy.gather_objects(p.detach().numpy())
        assert all(np.array_equal(everyone[0], other) for other in everyone)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.3},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_training_is_that_of_one_process(strategy, counted, arguments, dtype):
    model = DistributedDataParallel(network(dtype=dtype), strategy, **arguments)
    check(strategy, model, network(dtype=dtype))
    assert len(counted) >= 3


def test_gradients_that_a_program_keeps_are_its_own(strategy, counted):
    model, kept = DistributedDataParallel(network(), strategy), []
    for step in range(STEPS):
        _, (x, y) = rows_of(strategy, step)
        model.zero_grad()
        F.cross_entropy(model(x.double()), y).backward()
        gradients = [p.grad for p in model.parameters()]
        kept.append((gradients, [g.clone() for g in gradients]))
    for gradients, copies in kept:
        for gradient, copied in zip(gradients, copies):
            assert torch.equal(gradient, copied)
    assert counted


def test_models_that_come_and_go(strategy, counted):
    """Their buckets may lie where those of others lay, on some ranks only."""
    random = np.random.default_rng(strategy.extended.replica_id)
    alone = network()
    for _ in range(3):
        _ = torch.empty(random.integers(1, 10**6))  # other addresses on each rank
        model = DistributedDataParallel(copy.deepcopy(alone), strategy)
        check(strategy, model, alone)
        del model
    assert counted


def test_memory_of_models_that_are_gone_is_freed(strategy, counted, monkeypatch):
    monkeypatch.setattr(process_group, "_UNUSED_CALLS", 2)
    operations = group_of(strategy).operations
    for seed in range(8):
        model = DistributedDataParallel(network(seed), strategy)
        check(strategy, model, network(seed), range(20))
        del model
    gc.collect()
    assert 1 <= len(operations._group.symmetric_memory.regions) <= 4


@pytest.mark.parametrize("limit", [0, 10**6])
def test_a_node_with_too_little_memory(strategy, counted, monkeypatch, limit):
    monkeypatch.setattr(process_group, "_MOST_BYTES", limit)
    check(strategy, DistributedDataParallel(network(), strategy), network())
    assert len(counted) <= STEPS


def test_a_node_without_memory_is_asked_once(strategy, counted, monkeypatch):
    memory, asked = group_of(strategy).operations._group.symmetric_memory, []

    def allocate(operation, fields):
        asked.append(fields)
        raise ArgumentError("a node has too little memory")  # on all ranks

    monkeypatch.setattr(memory, "allocate", allocate)
    check(strategy, DistributedDataParallel(network(), strategy), network())
    assert len(asked) == 1
    assert not counted


def test_ranks_that_end_earlier(strategy, counted):
    rank, ranks = strategy.extended.replica_id, strategy.num_replicas_in_sync
    model = DistributedDataParallel(network(), strategy, rows=len)
    counts = [8 if r == 0 else 5 for r in range(ranks)]
    batches = [
        [rows_of(strategy, s * ranks + r)[0] for r in range(ranks)] for s in range(8)
    ]
    with model.join():
        train(model, [batches[step][rank] for step in range(counts[rank])])
    there = [
        [batch for batch, count in zip(of_ranks, counts) if step < count]
        for step, of_ranks in enumerate(batches)
    ]
    alone = network()
    train(alone, [tuple(map(torch.cat, zip(*several))) for several in there])
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(p, q)
    assert counted


@pytest.mark.mpi(min_size=2)
def test_a_users_reduction_on_one_rank_is_an_error_on_all(strategy, counted):
    model = DistributedDataParallel(network(), strategy, rows="equal")
    _, (x, y) = rows_of(strategy, 0)
    for _ in range(STEPS):
        F.cross_entropy(model(x.double()), y).backward()
    loss, numbers = F.cross_entropy(model(x.double()), y), torch.ones(counted[-1])
    # In a backward pass the error comes through C++
    with pytest.raises((MismatchError, RuntimeError), match="SUM of gradients"):
        if strategy.extended.replica_id == 0:
            torch.distributed.all_reduce(numbers.double(), group=model.process_group)
        else:
            loss.backward()
