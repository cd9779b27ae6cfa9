"""Confusion matrices over the rows of all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.errors import ArgumentError, ArgumentTypeError
from mpidist.statistics.statistic import CountStatistic, host_rows
from mpidist.util import validation

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy


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
        if classes.size and classes.dtype.kind not in "biu":  # [] has float64
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
