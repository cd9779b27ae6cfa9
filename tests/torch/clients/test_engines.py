"""What PyTorch itself brings for training on many ranks, over MPI.

One process of PyTorch, which has the rows of all ranks, is the oracle.
"""

import copy

import pytest

torch = pytest.importorskip("torch")
dist = torch.distributed
nn = torch.nn
DistributedDataParallel = nn.parallel.DistributedDataParallel
pytestmark = [
    pytest.mark.comm,
    # What PyTorch's parts say about each other
    pytest.mark.filterwarnings(
        "ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"
    ),
]
WORDS, WIDTH, LENGTH = 13, 12, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """A small transformer, the same whenever it is made."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(WORDS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(2))
            self.head = nn.Linear(WIDTH, WORDS)
        self.double()  # else Adam would scale rounding up, where gradients are 0

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(WORDS, (count, LENGTH + 1), generator=generator)


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def part(tokens, rank, ranks):
    return tokens.chunk(ranks)[rank]


def batches(ranks, steps=4):
    return [rows(2 * ranks, seed) for seed in range(steps)]


def train_alone(model, steps, make=lambda p: torch.optim.AdamW(p, 1e-2), clip=None):
    optimizer = make(model.parameters())
    losses = []
    for tokens in steps:
        optimizer.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(model, optimizer, steps, rank, ranks, clip=None):
    losses = []
    for tokens in steps:
        optimizer.zero_grad()
        loss = loss_of(model, part(tokens, rank, ranks))
        loss.backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
    return losses


def same(model, alone):
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def sharded(ranks):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("an older PyTorch has no fully_shard")
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    model = Transformer()
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)
    return model


def test_fully_shard_trains_as_one_process(group, rank, ranks):
    model, alone = sharded(ranks), Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    steps = batches(ranks)
    losses = train(
        model,
        optimizer,
        steps,
        rank,
        ranks,
        lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5),
    )
    torch.testing.assert_close(losses, train_alone(alone, steps, clip=0.5))
    same(model, alone)


def test_fully_shard_with_two_dimensions(group, rank, ranks):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard") or ranks % 2:
        pytest.skip("needs fully_shard, and an even number of ranks")
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards")
    )
    model, alone = Transformer(), Transformer()
    fsdp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    steps = batches(ranks)
    losses = train(model, optimizer, steps, rank, ranks)
    expected = train_alone(alone, steps, lambda p: torch.optim.SGD(p, 0.1))
    torch.testing.assert_close(losses, expected)
    same(model, alone)


@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_the_first_fsdp_trains_as_one_process(group, rank, ranks, sharding):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    wrap = fsdp.wrap.ModuleWrapPolicy({Block})
    model = fsdp.FullyShardedDataParallel(
        Transformer(),
        auto_wrap_policy=wrap,
        sharding_strategy=fsdp.ShardingStrategy[sharding],
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    alone, steps = Transformer(), batches(ranks)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = train(model, optimizer, steps, rank, ranks)
    torch.testing.assert_close(losses, train_alone(alone, steps))
    with fsdp.FullyShardedDataParallel.summon_full_params(model):
        expected = list(alone.parameters())
        found = list(model.parameters())
        for p, q in zip(found, expected):
            torch.testing.assert_close(p, q)


@pytest.mark.parametrize("overlapped", [False, True])
def test_optimizer_with_states_on_some_ranks(group, rank, ranks, overlapped):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, alone = DistributedDataParallel(Transformer()), Transformer()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        torch.optim.AdamW,
        parameters_as_bucket_view=overlapped,
        lr=1e-2,
    )
    steps = batches(ranks)
    losses = train(model, optimizer, steps, rank, ranks)
    torch.testing.assert_close(losses, train_alone(alone, steps))
    same(model, alone)
    optimizer.consolidate_state_dict(0)
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(alone.parameters()))


def test_join_of_ranks_with_different_numbers_of_batches(group, rank, ranks):
    """Ranks that have ended count as gradients of zero."""
    from torch.distributed.algorithms.join import Join

    model, alone = DistributedDataParallel(Transformer()), Transformer()
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (model, alone)]
    with Join([model], divide_by_initial_world_size=True):
        for tokens in batches(ranks, 2 + rank):
            optimizers[0].zero_grad()
            loss_of(model, part(tokens, rank, ranks)).backward()
            optimizers[0].step()
    for step, tokens in enumerate(batches(ranks, 1 + ranks)):
        optimizers[1].zero_grad()
        for r in range(ranks):
            if step < 2 + r:
                (loss_of(alone, part(tokens, r, ranks)) / ranks).backward()
        optimizers[1].step()
    same(model, alone)


def test_tensor_parallel_layers(group, rank, ranks):
    parallel = pytest.importorskip("torch.distributed.tensor.parallel")
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    model, alone = Transformer(), Transformer()
    for block in model.blocks:
        plan = {"up": parallel.ColwiseParallel(), "down": parallel.RowwiseParallel()}
        parallel.parallelize_module(block, mesh, plan)
    make = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    steps = batches(ranks)  # each rank has all rows
    losses = train_alone(model, steps, make)
    torch.testing.assert_close(losses, train_alone(alone, steps, make))
    same(model, alone)


def test_distributed_tensors(group, rank, ranks):
    tensor = pytest.importorskip("torch.distributed.tensor")
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,))
    whole = torch.arange(7.0 * 5).reshape(7, 5)  # rows do not divide by the ranks
    by_rows = tensor.distribute_tensor(whole, mesh, [tensor.Shard(0)])
    by_columns = by_rows.redistribute(mesh, [tensor.Shard(1)])
    assert torch.equal(by_columns.full_tensor(), whole)
    product = by_rows @ tensor.distribute_tensor(whole.T, mesh, [tensor.Replicate()])
    assert torch.equal(product.full_tensor(), whole @ whole.T)
    assert by_rows.sum().full_tensor() == whole.sum()


def test_pipeline_schedules(group, rank, ranks):
    pipelining = pytest.importorskip("torch.distributed.pipelining")
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(ranks)]
    alone = nn.Sequential(*copy.deepcopy(layers))
    x, y = torch.randn(8, 8), torch.randn(8, 8)
    nn.functional.mse_loss(alone(x), y).backward()
    if ranks == 1:
        return
    stage = pipelining.PipelineStage(layers[rank], rank, ranks, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y) if rank == ranks - 1 else schedule.step()
    torch.testing.assert_close(layers[rank].weight.grad, alone[rank].weight.grad)


def test_batches_of_different_sizes_weigh_the_same(group, rank, ranks):
    """As PyTorch's documentation says: the mean of the ranks' gradients."""
    model, alone = DistributedDataParallel(Transformer()), Transformer()
    tokens = rows(ranks * (ranks + 1) // 2)
    mine = tokens.split([r + 1 for r in range(ranks)])
    loss_of(model, mine[rank]).backward()
    for r in range(ranks):
        (loss_of(alone, mine[r]) / ranks).backward()
    for p, q in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
