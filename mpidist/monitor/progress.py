"""Progress of a loop: a bar on rank 0, or a line per minute without a terminal."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from mpi4py import MPI

from mpidist.context import get_strategy, has_strategy
from mpidist.errors import ArgumentTypeError
from mpidist.util import logs, nest, validation
from mpidist.util.counters import Counters
from mpidist.util.representation import one_line
from mpidist.values import PerReplica, select_replica

T = TypeVar("T")
_LINE_SECONDS = 60.0
_BAR_SECONDS = 0.5


def progress(
    iterable: Iterable[T], total: int | None = None, *, unit: str = "step"
) -> Progress[T]:
    """Wrap `iterable` with a progress display on rank 0.

    Rank 0 shows a bar on stderr: rate, rows per second, share of time spent waiting for
    other ranks, and remaining time. If stderr is not a terminal, or tqdm is not
    installed, it prints a line per minute. Other ranks show nothing. Iterating is
    collective if iterating over `iterable` is.

    Args:
      iterable: a distributed dataset, or anything else, such as `range(epochs)`.
      total: the number of items; by default `len(iterable)`, if it has a length.
      unit: the name of an item.

    Raises:
      ArgumentTypeError, ArgumentError: `total` is not a number >= 0, `unit` is not
        text, or `iterable` not iterable; on all ranks if it is a distributed dataset.

    Example:
      >>> rows = mpidist.Dataset.range(8).batch(4)
      >>> data = strategy.experimental_distribute_dataset(rows)
      >>> sum(1 for batch in mpidist.progress(data))
      2
    """
    return Progress(iterable, total, unit)


class Progress(Generic[T]):
    """The result of `progress`; can be iterated over repeatedly.

    Args:
      iterable: see `progress`.
      total: likewise.
      unit: likewise.
    """

    def __init__(self, iterable: Iterable[T], total: int | None, unit: str):
        self._iterable = iterable
        self._group = getattr(getattr(iterable, "_plan", None), "extended", None)

        def check() -> tuple[int | None, str]:
            if not hasattr(iterable, "__iter__") and not hasattr(
                iterable, "__getitem__"
            ):
                what = validation.shown(iterable)
                raise ArgumentTypeError(f"progress needs an iterable, not {what}")
            also = validation.instance("unit", unit, str)
            return validation.optional_integer("total", total, least=0), also

        # If all ranks iterate together, all raise
        if self._group is None:
            self._total, self._unit = check()
        else:
            self._total, self._unit = self._group.consensus.run("progress", check)
        if self._group is None and has_strategy():
            self._group = get_strategy().extended

    def __repr__(self) -> str:
        return one_line(self, lambda: f"of {self._iterable!r}")

    def __len__(self) -> int:
        if self._total is not None:
            return self._total
        return len(self._iterable)  # type: ignore[arg-type] # or a TypeError

    def __iter__(self) -> Iterator[T]:
        if MPI.COMM_WORLD.Get_rank():
            yield from self._iterable
            return
        total = None
        with contextlib.suppress(Exception):  # of the user's object
            total = len(self)
        shown = _Shown(total, self._unit, self._group)
        try:
            for item in self._iterable:
                yield item
                shown.add(item)
        finally:
            shown.close()


class _Shown:
    """The display of one iteration. Its methods never raise."""

    def __init__(self, total: int | None, unit: str, group: Any):
        self._total, self._unit = total, unit
        self._replicas, self._counters = 1, Counters()
        if group is not None:
            self._replicas = group.num_replicas
            self._counters = group.consensus.recorder.counters
        self._count = self._rows = 0
        self._begun, self._waited = time.monotonic(), self._counters.waiting
        self._bar: Any = None
        with contextlib.suppress(Exception):  # of a replaced stderr
            self._bar = _make_bar(total, unit) if sys.stderr.isatty() else None
        self._every = _LINE_SECONDS if self._bar is None else _BAR_SECONDS
        self._due = self._begun + self._every
        self._has_shown = self._bar is not None

    def add(self, item: Any) -> None:
        self._count += 1
        self._rows += _count_rows(item)
        if time.monotonic() >= self._due:
            self._show()

    def _show(self) -> None:
        now = time.monotonic()
        self._due = now + self._every
        self._has_shown = True
        with contextlib.suppress(Exception):  # a full disk, a broken pipe
            took = max(now - self._begun, 1e-9)
            if self._bar is None:
                logs.write(self._line(took))
                return
            self._bar.update(self._count - self._bar.n)
            self._bar.set_postfix_str(", ".join(self._extras(took)))

    def _extras(self, took: float) -> list[str]:
        """Return rows a second, and the share of waiting."""
        found = []
        if self._rows:
            found.append(f"{self._rows * self._replicas / took:,.0f} rows/s")
        if self._replicas > 1:
            waited = (self._counters.waiting - self._waited) / 1e9
            found.append(f"{100 * waited / took:.0f} % waiting")
        return found

    def _line(self, took: float) -> str:
        rate = self._count / took
        of = "" if self._total is None else f" of {self._total:,}"
        parts = [f"{self._unit} {self._count:,}{of}", f"{rate:.3g}/s"]
        parts += self._extras(took)
        if self._total is not None and rate:
            left = max(0, self._total - self._count) / rate
            parts.append(f"{_clock(left)} left" if left else f"took {_clock(took)}")
        return f"mpidist: {', '.join(parts)}"

    def close(self) -> None:
        """Show the end, if anything was shown."""
        if self._has_shown:
            self._show()
        if self._bar is not None:
            with contextlib.suppress(Exception):
                self._bar.close()


def _make_bar(total: int | None, unit: str) -> Any:
    """Return a bar of tqdm; None, with a message once, if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        _say_no_tqdm()
        return None
    return tqdm(total=total, unit=unit, file=sys.stderr)


@functools.cache
def _say_no_tqdm() -> None:
    logs.write(
        "mpidist: progress prints a line per minute because tqdm is not installed; "
        "for a bar, run `pip install tqdm`"
    )


def _count_rows(item: Any) -> int:
    """Return how many rows a batch has on this replica; 0 if it is no batch."""
    with contextlib.suppress(Exception):  # of any object that a user iterates over
        first = select_replica(nest.flatten(item)[0][0])
        if isinstance(first, PerReplica):
            first = first.values[0]
        return int(first.shape[0])
    return 0


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
