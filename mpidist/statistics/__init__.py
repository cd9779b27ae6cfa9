"""Statistics of the rows of all ranks: exact, and the same on any number of ranks.

`update_state` adds rows of one rank without communication; `result` combines the rows
of all ranks and is collective. The methods have the names of Keras' metrics. Results
do not depend on the distribution of rows over ranks and batches.

    moments = mpidist.statistics.Moments(strategy)
    for batch in distributed_dataset:
        strategy.run(moments.update_state, args=(batch,))
    print(moments.result().mean)

`mpidist.Checkpoint` saves and restores their state on any number of ranks.
"""

from __future__ import annotations

from mpidist.statistics.counts import ConfusionMatrix, Histogram, HistogramResult
from mpidist.statistics.moments import Description, Moments, describe
from mpidist.statistics.quantiles import Quantiles
from mpidist.statistics.statistic import Statistic

__all__ = [
    "ConfusionMatrix",
    "Description",
    "Histogram",
    "HistogramResult",
    "Moments",
    "Quantiles",
    "Statistic",
    "describe",
]
