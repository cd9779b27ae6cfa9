"""Half of a job of two MPI worlds that connect; `test_topology.py` starts both.

Usage: connected_job.py server|client FIFO
"""

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import mpidist

role, fifo = sys.argv[1], Path(sys.argv[2])
world = MPI.COMM_WORLD
if role == "server":
    port = MPI.Open_port() if world.rank == 0 else None
    if world.rank == 0:
        fifo.write_text(port)  # waits for the other job to read it
    link = world.Accept(port)
else:
    link = world.Connect(fifo.read_text() if world.rank == 0 else None)
comm = link.Merge(high=role == "client")
strategy = mpidist.MirroredStrategy(communicator=comm)
ranks = comm.size
for count in (3, 1000, 300_000):
    value = np.arange(count) + comm.rank
    total = strategy.reduce("SUM", value)
    assert np.array_equal(total, ranks * np.arange(count) + sum(range(ranks)))
    gathered = strategy.gather(value[: comm.rank], axis=0)
    assert gathered.tolist() == [
        r + i for r in range(ranks) for i in range(min(r, count))
    ]
symmetric = strategy.symmetric_like(np.zeros(300_000))
symmetric[...] = comm.rank
assert (strategy.reduce("SUM", symmetric) == sum(range(ranks))).all()
buckets = strategy.gradient_buckets([symmetric])
with buckets:
    buckets.put(0, symmetric)
assert (buckets.result[0] == sum(range(ranks))).all()
sizes = strategy.extended.topology.node_sizes
name = strategy.extended.collectives.transport.name
# In one piece: print may write several, which others' come between
sys.stdout.write(f"{role} {comm.rank} {sizes} {name}\n")
strategy.experimental_finalize()
comm.Free()
link.Disconnect()
