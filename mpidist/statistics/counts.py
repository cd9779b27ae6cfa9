"""Statistics that count: histograms and confusion matrices."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.statistics.statistic import Statistic, host_rows
from mpidist.util import validation
from mpidist.util.dtypes import digits, is_integer, is_real

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy


class CountStatistic(Statistic):
    """Base of statistics whose state is only an array of counts, `_counts`."""

    _counts: Any

    def _extent(self) -> list[int]:
        return []

    def _of_all_ranks(self) -> Any:
        self._compare()
        whole = copy.copy(self)
        whole._counts = self._all_reduce("SUM", self._counts)
        return whole

    def _add(self, other: Any) -> None:
        self._counts += other._counts

    def _to_state(self) -> dict[str, Any]:
        kind, settings, _ = self._kind()
        return {"kind": kind, "settings": settings, "counts": self._counts}

    def _from_state(self, state: Mapping[str, Any]) -> None:
        self._counts = np.array(state["counts"])


class HistogramResult(NamedTuple):
    """The result of `Histogram.result`.

    Args:
      counts: int64 of shape (bins,).
      edges: float64 of shape (bins + 1,). A bin includes its lower edge; the last bin
        also its upper edge.
      below: the number of values below the first edge.
      above: the number of values above the last edge.
      nan: the number of nan.

    Example:
      >>> ages = mpidist.statistics.Histogram(2, (0, 80), strategy=strategy)
      >>> ages.update_state([5, 90])  # on both replicas
      >>> counts, edges, below, above, nan = ages.result()
      >>> print(counts, edges, above)
      [2 0] [ 0. 40. 80.] 2
    """

    counts: Any
    edges: Any
    below: int
    above: int
    nan: int


class Histogram(CountStatistic):
    """Counts of numbers in bins, as `numpy.histogram` counts all rows as float64.

    Numbers outside the bins are counted too.

    Args:
      bins: the number of bins of equal width, or the edges: at least two, ascending;
        equal ones and infinite ones are allowed, as in NumPy.
      range: the first and the last edge, if `bins` is a number.
      strategy: see `Statistic`.

    Raises:
      ArgumentError: there are no such bins; `range` is missing.

    Example:
      >>> ages = mpidist.statistics.Histogram(4, (0, 80), strategy=strategy)
      >>> ages.update_state([5, 17, 90] if strategy.rank else [64, 80])
      >>> found = ages.result()
      >>> found.counts, found.above
      (array([2, 0, 0, 2]), 1)
    """

    def __init__(
        self,
        bins: int | Sequence[float] = 10,
        range: tuple[float, float] | None = None,
        strategy: Strategy | None = None,
    ):
        self._edges = _edges(bins, range)
        self._bins: Any = bins if np.ndim(bins) == 0 else self._edges
        self._range = range
        super().__init__(strategy)

    def reset_state(self) -> None:
        """Remove the rows that this rank has added. Not collective."""
        self._counts = np.zeros(len(self._edges) - 1 + 3, np.int64)

    def update_state(self, rows: Any) -> None:
        """Add numbers of this rank, of any shape except (). Not collective.

        Raises: ArgumentError, ArgumentTypeError: see `Moments.update_state`.
        """
        numbers = host_rows(rows).ravel()
        if not is_integer(numbers.dtype):
            # NumPy's edges would be float32 for such numbers
            numbers = numbers.astype(np.float64)
        inside = np.histogram(numbers, self._bins, self._range)[0]
        below = (numbers < self._edges[0]).sum()
        above = (numbers > self._edges[-1]).sum()
        rest = len(numbers) - inside.sum() - below - above
        self._counts += [*inside, below, above, rest]

    def _settings(self) -> str:
        first, last = self._edges[[0, -1]].tolist()
        text = f"{len(self._edges) - 1} bins from {first} to {last}"
        if np.ndim(self._bins) == 0:
            return text
        return f"{text}, edges {self._edges.tolist()}"

    def _rows_kind(self) -> str:
        return "numbers"  # of any dtype

    def _shown_rows(self) -> str:
        return f"{self._counts.sum()} numbers"

    def _describe(self) -> HistogramResult:
        below, above, nan = self._counts[-3:].tolist()
        counts = self._counts[:-3].copy()
        return HistogramResult(counts, self._edges.copy(), below, above, nan)


def _edges(bins: Any, range: tuple[float, float] | None) -> Any:
    """Return the edges of all bins."""
    if np.ndim(bins) == 0:
        if range is None:
            raise ArgumentError(
                "Histogram needs a range: the minimum and maximum over all ranks are "
                "not known in advance"
            )
        bins = validation.integer("bins", bins, 1)
    try:
        with np.errstate(all="ignore"):  # a wide range overflows to nan
            edges = np.histogram_bin_edges(np.zeros(0), bins, range)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise ArgumentError(f"Histogram: {error}") from error
    if not is_real(edges.dtype) or len(edges) < 2 or np.isnan(edges).any():
        where = "" if range is None else f" in a range of {validation.shown(range)}"
        raise ArgumentError(
            "bins must be a number, or at least two edges, which are numbers, not "
            f"{validation.shown(bins)}{where}"
        )
    return edges.astype(np.float64)


class ConfusionMatrix(CountStatistic):
    """Counts of pairs of classes: rows are labels, columns are predictions.

    Args:
      num_classes: classes are 0...num_classes - 1.
      strategy: see `Statistic`.

    Example:
      >>> matrix = mpidist.statistics.ConfusionMatrix(2, strategy=strategy)
      >>> matrix.update_state([0, 1, 1], [0, 1, 0])  # on both replicas
      >>> matrix.result()
      array([[2, 0],
             [2, 2]])
    """

    def __init__(self, num_classes: int, strategy: Strategy | None = None):
        self._classes = validation.integer("num_classes", num_classes, 1)
        super().__init__(strategy)

    def reset_state(self) -> None:
        """Remove the rows that this rank has added. Not collective."""
        self._counts = np.zeros((self._classes, self._classes), np.int64)

    def update_state(self, labels: Any, predictions: Any) -> None:
        """Add pairs of this rank. Not collective.

        Args:
          labels: integers of shape (rows,), the true classes.
          predictions: the predicted classes, likewise.

        Raises:
          ArgumentError: the shapes differ; a class is out of range. Nothing is added.
          ArgumentTypeError: not integers.
        """
        found = [
            self._classes_of("labels", labels),
            self._classes_of("predictions", predictions),
        ]
        if found[0].shape != found[1].shape:
            raise ArgumentError(
                f"labels have shape {found[0].shape}, predictions {found[1].shape}"
            )
        places = np.ravel_multi_index(found, self._counts.shape).ravel()
        counts = np.bincount(places, minlength=self._counts.size)
        self._counts += counts.reshape(self._counts.shape)

    def _classes_of(self, name: str, value: Any) -> Any:
        classes = host_rows(value, name)
        if classes.size and digits(classes.dtype):  # [] has float64
            raise ArgumentTypeError(f"{name} must be integers, not {classes.dtype}")
        if classes.size:
            least, most = int(classes.min()), int(classes.max())
            if least < 0 or most >= self._classes:
                raise ArgumentError(
                    f"{name} are between {least} and {most}, but classes are "
                    f"0...{self._classes - 1}"
                )
        return classes.astype(np.int64)

    def _settings(self) -> str:
        return f"{self._classes} classes"

    def _rows_kind(self) -> str:
        return "classes"

    def _shown_rows(self) -> str:
        return f"{self._counts.sum()} rows"

    def _describe(self) -> Any:
        return self._counts.copy()
