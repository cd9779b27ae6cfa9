"""A job for several nodes: collectives, input and checkpoints against NumPy.

    nodes_job.py NODES RANKS_PER_NODE FOLDER

Each rank checks what it gets, and rank 0 says "all is well" after all have.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import h5py
import numpy as np

import mpidist

NODES, RANKS_PER_NODE = map(int, sys.argv[1:3])
FOLDER = Path(sys.argv[3])
RANKS = NODES * RANKS_PER_NODE
ROWS = 37
# Below and above where nodes reduce by parts, none, and what ranks cannot divide
SIZES = [0, 1, 1000, 70_001, 600_000]

strategy = mpidist.MirroredStrategy(["CPU:0"])
extended = strategy.extended
rank = extended.replica_id


def check_topology():
    topology = extended.topology
    assert (topology.rank, topology.size) == (rank, RANKS)
    assert topology.node_sizes == (RANKS_PER_NODE,) * NODES
    assert topology.local_rank == rank % RANKS_PER_NODE
    hosts = strategy.gather_objects(os.uname().nodename)
    assert hosts == [f"node{r // RANKS_PER_NODE}" for r in range(RANKS)]
    used = {
        name
        for rows in extended.collectives.transports.table.values()
        for _, name in rows
    }
    adder = "hierarchical" if RANKS_PER_NODE > 1 else "ordered"
    assert used == {"mpi", adder, "ring"}


def values(count, dtype="f8"):
    """The arrays of all ranks, small integers, whose sums are exact."""
    return [(np.arange(count) % 13 + r).astype(dtype) for r in range(RANKS)]


def check_collectives():
    for count in SIZES:
        of_all = values(count)
        mine, total = of_all[rank], np.sum(of_all, axis=0)
        result = strategy.run(collectives, args=(mine,))
        found = {
            name: strategy.experimental_local_results(v)[0]
            for name, v in result.items()
        }
        require_equal(found["sum"], total)
        require_equal(found["sum in order"], total)
        require_equal(found["max"], np.max(of_all, axis=0))
        require_equal(found["halves"], np.sum(values(count, "f4"), axis=0))
        uneven = [
            value[: count - r] if count else value for r, value in enumerate(of_all)
        ]
        require_equal(found["gathered"], np.concatenate(uneven))
        require_equal(found["scattered"], np.array_split(total, RANKS)[rank])
        parts = [np.array_split(value, RANKS)[rank] for value in of_all]
        require_equal(found["exchanged"], np.concatenate(parts))
        for root in (0, RANKS - 1):
            require_equal(strategy.broadcast(mine, root), of_all[root])


def collectives(mine):
    context = mpidist.get_replica_context()
    in_order = mpidist.CommunicationOptions(reproducible=True)
    narrow = mpidist.CommunicationOptions(compression="bfloat16")
    count = len(mine)
    lengths = [len(part) for part in np.array_split(mine, RANKS)]
    return {
        "sum": context.all_reduce("SUM", mine),
        "sum in order": context.all_reduce("SUM", mine, in_order),
        "max": context.all_reduce("MAX", mine),
        "halves": context.all_reduce("SUM", mine.astype("f4"), narrow),
        "gathered": context.all_gather(mine[: count - rank] if count else mine, 0),
        "scattered": context.reduce_scatter("SUM", mine, lengths=lengths),
        "exchanged": context.all_to_all(mine, lengths=lengths),
    }


def require_equal(found, expected):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert (found == expected).all(), (rank, found, expected)


def check_gradients():
    """Buckets reduce, in a thread, what each rank puts in an order of its own."""
    shapes = {f"w{i}": (50 + i, 300) for i in range(20)}
    of_all = [
        {n: np.full(s, r + i) for i, (n, s) in enumerate(shapes.items())}
        for r in range(RANKS)
    ]
    like = {name: np.zeros(shape) for name, shape in shapes.items()}
    buckets = strategy.gradient_buckets(like, "SUM")
    for _ in range(3):
        with buckets:
            for name in sorted(shapes, reverse=bool(rank % 2)):
                buckets.put(name, of_all[rank][name].astype(float))
        for name in shapes:
            require_equal(buckets.result[name], sum(of[name] for of in of_all))


def check_input():
    """Files that rank 0 wrote; every row comes once per epoch."""
    data = np.arange(ROWS * 3, dtype="f4").reshape(ROWS, 3)
    paths = [FOLDER / "plain.h5", FOLDER / "chunked.h5"]
    if rank == 0:
        for path, how in zip(paths, [{}, {"chunks": (5, 3), "compression": "gzip"}]):
            with h5py.File(path, "w") as file:
                file.create_dataset("x", data=data, **how)
    strategy.barrier()
    for path in paths:
        dataset = mpidist.Dataset.from_hdf5([path], ["x"]).shuffle(seed=3).batch(8)
        rows = []
        for batch in strategy.experimental_distribute_dataset(dataset):
            rows.extend(strategy.gather(batch[0], axis=0).tolist())
        assert sorted(rows) == data.tolist()


def check_caches():
    """A row is mapped once per node at most, and a copy of it is there on each node."""
    mapped = []

    def note(x):
        mapped.append(int(x))
        return x * x

    dataset = (
        mpidist.Dataset.range(ROWS).map(note).cache().shuffle(seed=5).batch(2 * RANKS)
    )
    alone = mpidist.InputOptions(experimental_per_replica_buffer_size=0)
    divided = strategy.experimental_distribute_dataset(dataset, alone)
    for _ in range(4):
        rows = [strategy.gather(batch, axis=0) for batch in divided]
        require_equal(np.sort(np.concatenate(rows)), np.arange(ROWS) ** 2)
        strategy.barrier()
    of_all = strategy.gather_objects(mapped)
    for node in range(NODES):
        on_node = of_all[node * RANKS_PER_NODE : (node + 1) * RANKS_PER_NODE]
        counts = Counter(row for rows in on_node for row in rows)
        # More than one epoch would need, and none a second time
        assert len(counts) > ROWS // NODES, counts
        assert set(counts.values()) == {1}, counts


def check_checkpoints():
    """Written by all nodes, each a shard, and restored."""
    shape = (RANKS * 200, 1000)
    with strategy.scope():
        w = mpidist.Variable(np.arange(np.prod(shape), dtype="f8").reshape(shape))
    checkpoint = mpidist.Checkpoint(
        w=w, own=np.random.default_rng(rank), shard_bytes=1000
    )
    manager = mpidist.CheckpointManager(
        checkpoint, FOLDER / "run", 2, is_background=True
    )
    with manager:
        for _ in range(2):
            manager.save()
    shards = list((FOLDER / "run").glob("ckpt-2-*-of-*.h5"))
    assert len(shards) == RANKS, shards
    expected, drawn = w.numpy(), checkpoint.own.random(3)
    w.assign(np.zeros(shape))
    manager.restore_or_initialize()
    require_equal(w.numpy(), expected)
    require_equal(checkpoint.own.random(3), drawn)


for check in (
    check_topology,
    check_collectives,
    check_gradients,
    check_input,
    check_caches,
    check_checkpoints,
):
    check()
    strategy.barrier()
if rank == 0:
    print("all is well", flush=True)
