"""Base class of statistics: combining the rows of all ranks."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from mpidist.comm.consensus.public_calls import announce_errors
from mpidist.comm.consensus.signatures import group_by_rank
from mpidist.context import (
    get_strategy,
    has_strategy,
    in_replica_of,
    require_cross_replica,
)
from mpidist.device import arrays
from mpidist.errors import ArgumentError, ArgumentTypeError, ContextError, MismatchError
from mpidist.util.dtypes import is_real

if TYPE_CHECKING:
    from mpidist.strategy.strategy import Strategy

Own = TypeVar("Own", bound="Statistic")


class Statistic(abc.ABC):
    """Base of the statistics: Moments, Histogram, Quantiles, ConfusionMatrix.

    Args:
      strategy: the strategy whose ranks have the rows; None takes the current one.

    Raises:
      ContextError: there is no current strategy.
      ArgumentTypeError: it is not a strategy.

    Example:
      >>> moments = mpidist.statistics.Moments(strategy=strategy)
      >>> isinstance(moments, mpidist.statistics.Statistic)
      True
    """

    def __init__(self, strategy: Strategy | None = None):
        if strategy is None:
            if not has_strategy():
                raise ContextError(
                    f"{type(self).__name__}: pass `strategy=strategy`, or create it in "
                    "`with strategy.scope():`"
                )
            strategy = get_strategy()
        if not hasattr(strategy, "extended"):
            raise ArgumentTypeError(
                f"strategy must be a Strategy, not {type(strategy).__name__}"
            )
        self.distribute_strategy = strategy
        self.reset_state()

    @abc.abstractmethod
    def reset_state(self) -> None:
        """Remove the rows that this rank has added. Not collective."""

    def result(self) -> Any:
        """Return the statistic of the rows that all ranks have added. Collective.

        In any context of the strategy. More rows can be added afterwards.

        Raises, on all ranks:
          MismatchError: statistics, settings, dtypes or row shapes differ between
            ranks.
        """
        return self._of_all_ranks()._describe()

    def merge_state(self, others: Iterable[Own]) -> None:
        """Add the rows of other statistics of the same kind. Not collective.

        Raises:
          ArgumentError: settings, dtypes or row shapes differ.
          ArgumentTypeError: the type differs.
        """
        for other in others:
            if type(other) is not type(self):
                raise ArgumentTypeError(
                    f"merge_state: a {type(other).__name__} is not a "
                    f"{type(self).__name__}"
                )
            mine, theirs = self._kind(), other._kind()
            is_like = mine[2] == theirs[2] or not (mine[2] and theirs[2])
            if mine[:2] != theirs[:2] or not is_like:
                raise ArgumentError(
                    f"merge_state: {_shown(theirs)} does not match {_shown(mine)}"
                )
            self._add(other)

    def get_state(self) -> dict[str, Any]:
        """Return the state of all ranks: numbers, text, arrays. Collective."""
        state: dict[str, Any] = self._of_all_ranks()._to_state()
        return state

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`. Every rank calls.

        Rank 0 gets all rows; the other ranks then have none.

        Raises, on all ranks, ArgumentError: the settings differ.
        """
        kind = type(self).__name__, self._settings()
        other = state.get("kind"), state.get("settings")
        if other != kind:
            raise ArgumentError(
                f"the state is of {other[0]}({other[1]}), not of {kind[0]}({kind[1]})"
            )
        self.reset_state()
        self._from_state(state)  # on all ranks, as its errors are to be
        if self.distribute_strategy.extended.replica_id > 0:
            self.reset_state()

    def __repr__(self) -> str:
        settings = f" ({self._settings()})" if self._settings() else ""
        return f"<{type(self).__name__}{settings}: {self._shown_rows()} on this rank>"

    # What subclasses implement

    def _settings(self) -> str:
        """Return the arguments of the constructor, as text."""
        return ""

    def _rows_kind(self) -> str:
        """Return dtype and shape of the rows, as text; "" without rows."""
        return ""

    def _shown_rows(self) -> str:
        return self._rows_kind() or "no rows"

    def _kind(self) -> tuple[str, str, str]:
        return type(self).__name__, self._settings(), self._rows_kind()

    @abc.abstractmethod
    def _extent(self) -> list[int]:
        """Return integers whose minimum and maximum over the ranks are needed."""

    @abc.abstractmethod
    def _of_all_ranks(self) -> Any:
        """Return a statistic of the rows of all ranks. Collective."""

    @abc.abstractmethod
    def _describe(self) -> Any:
        """Return the result for the rows of this object."""

    @abc.abstractmethod
    def _add(self, other: Any) -> None:
        """Add the rows of another statistic with the same settings."""

    @abc.abstractmethod
    def _to_state(self) -> dict[str, Any]:
        """Return the state, with `kind` and `settings`."""

    @abc.abstractmethod
    def _from_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `_to_state`."""

    # Communication

    def _compare(self) -> tuple[str, list[int], list[int]]:
        """Return the rows' kind, and minimum and maximum extents. Collective.

        Ranks without rows are ignored; if no rank has rows, the results are empty.

        Raises, on all ranks: MismatchError.
        """
        extent = self._extent()
        found = self.distribute_strategy.gather_objects([*self._kind(), extent])
        kinds = [(name, settings, rows) for name, settings, rows, _ in found]
        rows = {rows for _, _, rows in kinds if rows}
        if len({kind[:2] for kind in kinds}) > 1 or len(rows) > 1:
            shown = group_by_rank([_shown(kind) for kind in kinds])
            raise MismatchError(f"the ranks have different statistics: {shown}")
        extents = [extent for _, _, rows, extent in found if rows]
        if not extents:
            return "", [], []
        return rows.pop(), [*map(min, zip(*extents))], [*map(max, zip(*extents))]

    def _all_reduce(self, op: str, value: Any) -> Any:
        """Return the reduction of counts and sums over all ranks. Collective."""
        strategy = self.distribute_strategy
        if not in_replica_of(strategy):
            require_cross_replica(strategy, type(self).__name__)
        return strategy.extended.reduce_own(type(self).__name__, op, value)


announce_errors(
    Statistic,
    ("result", "get_state"),
    lambda statistic: statistic.distribute_strategy.extended.consensus,
)


def _shown(kind: tuple[str, str, str]) -> str:
    name, settings, rows = kind
    return f"{name}({settings})" + (f" of rows {rows}" if rows else " without rows")


def row_shape(kind: str) -> tuple[int, ...]:
    """Return the shape of a row at the end of the text of `Statistic._rows_kind`."""
    sizes = kind[kind.index("[") + 1 : kind.index("]")]
    return tuple(int(size) for size in sizes.split(",") if size)


def host_rows(value: Any, name: str = "rows") -> Any:
    """Return the user's rows of this rank as a NumPy array.

    Raises:
      ArgumentTypeError: not an array, list or number, or text or complex numbers.
      ArgumentError: it has no dimension for rows.
    """
    array = arrays.to_host(arrays.to_tensor(value, name))
    if not is_real(array.dtype) or array.dtype.itemsize > 8:
        raise ArgumentTypeError(f"{name} must be real numbers, not {array.dtype}")
    if array.ndim == 0:
        raise ArgumentError(f"{name} must have a dimension for rows")
    return array
