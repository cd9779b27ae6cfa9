"""Statistics of the rows of all ranks: exact, and the same on any number of ranks.

`update_state` adds rows that one rank has, and communicates nothing; `result` puts
together what all ranks have added, and is collective. The names are those of Keras'
metrics. How rows are spread over ranks and batches changes no bit of a result.

    moments = mpidist.statistics.Moments(strategy)
    for batch in distributed_dataset:
        strategy.run(moments.update_state, args=(batch,))
    print(moments.result().mean)

They have a state that `mpidist.Checkpoint` saves and restores, on any number of ranks.
"""

from __future__ import annotations

from mpidist.statistics.confusion_matrix import ConfusionMatrix
from mpidist.statistics.histogram import Histogram, HistogramResult
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
