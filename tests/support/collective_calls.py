"""What tests of collectives share."""

import mpidist


def in_replica(strategy, name, *args):
    """What a collective of the replica context returns on this replica."""
    result = strategy.run(lambda: getattr(mpidist.get_replica_context(), name)(*args))
    return strategy.experimental_local_results(result)[0]
