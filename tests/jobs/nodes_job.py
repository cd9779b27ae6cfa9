"""A job for several nodes: what it finds, caches and checkpoints.

    nodes_job.py NODES RANKS_PER_NODE FOLDER

Each rank checks what it gets, and rank 0 says "all is well" after all have.
"""

import os
import sys
from collections import Counter
from pathlib import Path

import numpy as np

import mpidist

NODES, RANKS_PER_NODE = map(int, sys.argv[1:3])
FOLDER = Path(sys.argv[3])
RANKS = NODES * RANKS_PER_NODE
ROWS = 37

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


def require_equal(found, expected):
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert (found == expected).all(), (rank, found, expected)


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


for check in (check_topology, check_caches, check_checkpoints):
    check()
    strategy.barrier()
if rank == 0:
    print("all is well", flush=True)
