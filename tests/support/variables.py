"""Variables of a strategy, for tests."""

import numpy as np

import mpidist
from mpidist import VariableAggregation as Aggregation
from mpidist import VariableSynchronization as Synchronization

NONE, SUM, MEAN, FIRST = (
    Aggregation.NONE,
    Aggregation.SUM,
    Aggregation.MEAN,
    Aggregation.ONLY_FIRST_REPLICA,
)
ON_READ, ON_WRITE = Synchronization.ON_READ, Synchronization.ON_WRITE
START = np.arange(12.0).reshape(4, 3)


def make(strategy, aggregation=NONE, initial=START, on_read=False, **options):
    """A variable of a strategy."""
    on = ON_READ if on_read else ON_WRITE
    with strategy.scope():
        return mpidist.Variable(
            initial, aggregation=aggregation, synchronization=on, **options
        )
