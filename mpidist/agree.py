"""Failing on all ranks at once.

Every collective of mpidist starts with one small MPI_Allreduce of the same form, in
which each rank tells what it is about to do, or that it has failed. So ranks that do
different things, or of which one cannot go on, find out before any data move, and all
raise. In the good case this costs the latency of a 24-byte Allreduce.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from mpi4py import MPI

from mpidist import nest
from mpidist.errors import (
    CollectiveError,
    DeadlineError,
    DivergenceError,
    MismatchError,
    RemoteError,
)

__all__ = ["Agreement", "Call"]

T = TypeVar("T")
_PACKAGE = str(Path(__file__).parent) + os.sep
_HERE_TAG = 1


class Call(NamedTuple):
    """What a rank is about to do, equal on all ranks: hashable, and cheap to compare.

    Args:
      operation: the collective, as the user called it.
      options: pairs of an argument's name and its value.
      spec: the structure of the value, or None.
      leaves: what must agree of each leaf, usually its dtype and shape.
    """

    operation: str
    options: tuple[tuple[str, Any], ...] = ()
    spec: nest.Spec | None = None
    leaves: tuple[Any, ...] = ()

    def describe(self) -> dict[str, str]:
        """Return each thing that must agree by its name."""
        lines = {name: str(value) for name, value in self.options}
        if self.spec is not None:
            lines["the structure of value"] = str(self.spec)
            names = nest.leaf_names(self.spec, "value")
            lines.update(zip(names, map(_text, self.leaves), strict=True))
        return lines


def _text(leaf: Any) -> str:
    return " ".join(map(str, leaf)) if isinstance(leaf, tuple) else str(leaf)


@functools.lru_cache(maxsize=4096)
def _digest(call: Call) -> int:
    """Return 62 bits that are the same in every process for the same call."""
    text = repr((call.operation, call.options, str(call.spec), call.leaves))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class _Record(NamedTuple):
    """What one rank tells the others once something is wrong."""

    operation: str
    lines: dict[str, str]
    site: str
    error: bytes | None
    report: str


class Agreement:
    """The agreement of all ranks of one communicator, which must be private to it."""

    def __init__(self, comm: MPI.Intracomm):
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.calls = 0
        self.broken: str | None = None
        self._mine = np.zeros(3, np.int64)
        self._highest = np.zeros(3, np.int64)
        self._abandoned: list[Any] = []

    def require_same(
        self, call: Call, error: Exception | None = None, timeout: float | None = None
    ) -> None:
        """Return when all ranks are in the same call and none failed. Collective.

        Args:
          call: what this rank is about to do.
          error: the reason why this rank cannot, if so.
          timeout: seconds to wait for the other ranks; None for ever.

        Raises, on all ranks:
          The error of a rank that passed one (each failed rank raises its own, the
            others a copy of the first).
          DivergenceError: the operations differ.
          MismatchError: the operations agree, but not the rest of the call.
          DeadlineError: on the ranks that waited for more than `timeout`.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        self._require_usable()
        self.calls += 1
        mine, highest = self._mine, self._highest
        digest = _digest(call)
        mine[0], mine[1], mine[2] = digest, -digest, error is not None
        if timeout is None:
            self.comm.Allreduce(mine, highest, MPI.MAX)
        else:
            request = self.comm.Iallreduce(mine, highest, MPI.MAX)
            self.wait(request, time.monotonic() + timeout, call.operation)
        if highest[2] == 0 and highest[0] == -highest[1]:
            return
        self._raise_difference(call, error)

    def raise_together(self, operation: str, error: Exception | None) -> None:
        """Raise on all ranks if any rank has an error. Collective."""
        self.require_same(Call(operation), error)

    def prepare(self, operation: str, fn: Callable[[], T]) -> T:
        """Return `fn()`, which must not communicate; its error is raised on all ranks.

        Not collective in itself: the collective `operation` must follow, in which the
        other ranks learn of the error.
        """
        try:
            return fn()
        except Exception as error:
            self.raise_together(operation, error)
            raise

    def root_only(self, operation: str, fn: Callable[[], T], root: int = 0) -> T:
        """Return what `fn()` returns on rank `root`, which alone calls it. Collective.

        Raises: what `fn` raises, on all ranks.
        """
        payload, error = b"", None
        if self.rank == root:
            try:
                payload = pickle.dumps(fn())
            except Exception as caught:
                error = caught
        self.require_same(Call(operation), error)
        if self.size > 1:
            payload = self.comm.bcast(payload, root)
        return pickle.loads(payload)  # type: ignore[no-any-return]

    def gather(self, operation: str, value: T) -> list[T]:
        """Return the `value` of every rank, by rank. Collective.

        For small objects: they are pickled.
        """
        self.require_same(Call(operation))
        return [value] if self.size == 1 else self.comm.allgather(value)

    def wait(self, request: MPI.Request, deadline: float, operation: str) -> None:
        """Wait for an MPI request until `deadline`, on time.monotonic's clock.

        Raises:
          DeadlineError: names the ranks that were not heard of. The communicator
            cannot be used afterwards.
        """
        start = time.monotonic()
        announce = start + (deadline - start) / 2
        arrived: set[int] | None = None
        pause = 0.0
        while not request.Test():
            now = time.monotonic()
            if now > announce and arrived is None:
                arrived = self._announce()
            if arrived is not None:
                self._collect(arrived)
            if now > deadline:
                self._abandoned.append(request)
                self._miss_deadline(operation, deadline - start, arrived or set())
            time.sleep(pause)
            pause = min(pause + 1e-6, 1e-3)

    def _announce(self) -> set[int]:
        """Tell all other ranks that this one waits in its current call."""
        here = np.array([self.calls])
        others = [r for r in range(self.size) if r != self.rank]
        requests = [self.comm.Isend(here, r, _HERE_TAG) for r in others]
        self._abandoned.append((here, requests))
        return {self.rank}

    def _collect(self, arrived: set[int]) -> None:
        """Add the ranks that announced the current call."""
        status, call = MPI.Status(), np.zeros(1, np.int64)
        while self.comm.Iprobe(tag=_HERE_TAG, status=status):
            self.comm.Recv(call, status.Get_source(), _HERE_TAG)
            if call[0] == self.calls:
                arrived.add(status.Get_source())

    def _miss_deadline(
        self, operation: str, seconds: float, arrived: set[int]
    ) -> NoReturn:
        missing = [r for r in range(self.size) if r not in arrived]
        late = f"{_ranks(missing)} did not arrive" if missing else "it did not finish"
        self.broken = (
            f"rank {self.rank} waited {seconds:g} s in {operation} (called at "
            f"{_call_site()}), but {late}"
        )
        raise DeadlineError(self.broken)

    def _require_usable(self) -> None:
        if self.broken is not None:
            raise CollectiveError(
                f"this strategy cannot communicate any more: {self.broken}"
            )

    def _raise_difference(self, call: Call, error: Exception | None) -> NoReturn:
        record = _Record(
            call.operation, call.describe(), _call_site(), _dump(error), _report(error)
        )
        records = self.comm.allgather(record)
        failed = [rank for rank, r in enumerate(records) if r.error is not None]
        if failed:
            self._raise_error(records, failed, error)
        if len({r.operation for r in records}) > 1:
            raise DivergenceError(
                f"the replicas called different collectives (call {self.calls} of this "
                f"strategy): {_group([f'{r.operation} at {r.site}' for r in records])}."
                " Every replica must make the same calls in the same order"
            )
        raise MismatchError(
            f"{call.operation}: the replicas' arguments differ: {_differences(records)}"
        )

    def _raise_error(
        self, records: Sequence[_Record], failed: list[int], error: Exception | None
    ) -> NoReturn:
        origin = failed[0]
        if error is None:
            record = records[origin]
            assert record.error is not None
            error = _load(record.error, origin)
            error.__cause__ = RemoteError(f"on rank {origin}:\n{record.report}")
        with contextlib.suppress(AttributeError):
            error.origin_rank = origin  # type: ignore[attr-defined]
            error.raised_elsewhere = origin != self.rank  # type: ignore[attr-defined]
        raise error


def _dump(error: Exception | None) -> bytes | None:
    """Return `error` pickled, or a RemoteError with its text where that fails."""
    if error is None:
        return None
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # an exception class may fail in any way here
        return pickle.dumps(RemoteError(f"{type(error).__qualname__}: {error}"))
    return data


def _load(data: bytes, origin: int) -> Exception:
    try:
        error = pickle.loads(data)
    except Exception as caught:  # a class that exists only on the other rank
        error = RemoteError(f"rank {origin} failed; its error cannot be read: {caught}")
    return error if isinstance(error, Exception) else RemoteError(repr(error))


def _report(error: Exception | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))


def _call_site() -> str:
    """Return file and line of the innermost frame outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _differences(records: Sequence[_Record]) -> str:
    """Name the first thing that differs, and what each rank has there."""
    names = {name: None for record in records for name in record.lines}
    for name in names:
        texts = [record.lines.get(name, "nothing") for record in records]
        if len(set(texts)) > 1:
            return f"{name} is {_group(texts)}"
    sites = _group([record.site for record in records])
    raise CollectiveError(f"calls differ that look the same: {sites}")


def _group(texts: Sequence[str]) -> str:
    """Write each text once, with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{text} on {_ranks(found)}" for text, found in ranks.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
