"""What all ranks got of a distributed dataset, for tests to compare."""


def local(strategy, value):
    """This rank's component."""
    (component,) = strategy.experimental_local_results(value)
    return component


def on_all_ranks(strategy, comm, batches):
    """The batches of every step: a list of the components of all ranks."""
    mine = [local(strategy, batch) for batch in batches]
    everyone = comm.allgather(mine)
    assert len({len(batches) for batches in everyone}) == 1
    return list(map(list, zip(*everyone)))


def in_order(steps):
    """The rows of what `on_all_ranks` returns, in their order."""
    return [row for parts in steps for part in parts for row in part.tolist()]


def require_usable(strategy):
    """Require that the ranks can communicate as before."""
    n = strategy.num_replicas_in_sync
    assert strategy.reduce("SUM", strategy.extended.replica_id + 1) == n * (n + 1) // 2


def mine(strategy, batches):
    """This rank's part of every batch."""
    return [local(strategy, batch) for batch in batches]


def rows_in_order(strategy, comm, batches):
    """The rows of all ranks, in their order."""
    return in_order(on_all_ranks(strategy, comm, batches))


def local_rows(strategy, batches):
    """This rank's rows of every batch, as lists."""
    return [part.tolist() for part in mine(strategy, batches)]


def on_root(comm, function, *arguments):
    """Call a function on one rank while the others wait."""
    comm.Barrier()
    if comm.rank == 0:
        function(*arguments)
    comm.Barrier()
