"""Paths of a job's files: that all ranks see them, can write them, and lock them."""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpidist.tools.doctor import file_systems, locks
from mpidist.tools.doctor.file_systems import PathFacts
from mpidist.tools.doctor.finding import (
    Failure,
    Finding,
    Status,
    by_rank,
    name_each,
    name_ranks,
)
from mpidist.tools.doctor.workers import Worker
from mpidist.util.available_memory import as_text

__all__ = ["PathReport", "Paths", "check_path"]

# Where no file can be made, errors that have other reasons than whose the folder is
_TROUBLES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENFILE)
_LOCKING = "HDF5_USE_FILE_LOCKING"
_LITTLE = 0.01


class PathReport(NamedTuple):
    """What one rank found of one path; None for what it did not try.

    Args:
      looked: what is there.
      opened: why an HDF5 file cannot be read, or nothing.
      written: see `file_systems.write`.
      held: see `locks.hold`.
      seen: see `locks.see`.
    """

    looked: PathFacts | Failure
    opened: str | Failure | None = None
    written: tuple[int, str] | Failure | None = None
    held: dict[str, tuple[str, str]] | Failure | None = None
    seen: dict[str, str] | Failure | None = None


class Paths:
    """The paths as one rank tries them. To be made before MPI starts, as it forks.

    Args:
      paths: to try.
      seconds: how long each step may take, for all paths together.
    """

    def __init__(self, paths: Sequence[str], seconds: float):
        self.paths = paths
        self._seconds = seconds
        self._workers = [Worker() for _ in paths]
        self._others = [Worker() for _ in paths]  # who sees locks, where one is alone
        self._reports = [PathReport(Failure("not looked at")) for _ in paths]

    def look(self, is_writer: bool, is_holder: bool) -> list[Any]:
        """Look, and perhaps write and take locks; return the locks, by path."""
        calls: list[Any] = [(file_systems.look, path) for path in self.paths]
        looked = self._ask(self._workers, calls)
        self._reports = [PathReport(found) for found in looked]
        self._set("opened", file_systems.open_hdf5, self._hdf5_files())
        if is_writer:
            self._set("written", file_systems.write, self._folders())
        if is_holder:
            are_writable = [
                folder if report.written == (0, "") else None
                for folder, report in zip(self._folders(), self._reports, strict=True)
            ]
            self._set("held", locks.hold, are_writable)
        return [report.held for report in self._reports]

    def see(self, held: Sequence[Any]) -> None:
        """See whether other ranks' locks hold."""
        self._set("seen", locks.see, held)

    def see_own(self) -> None:
        """See whether the locks that this process took hold for another one."""
        held = [
            None if isinstance(report.held, Failure) else report.held
            for report in self._reports
        ]
        calls = [found and (locks.see, found) for found in held]
        seen = self._ask(self._others, calls)
        self._reports = [
            report._replace(seen=found)
            for report, found in zip(self._reports, seen, strict=True)
        ]

    def release(self) -> None:
        """Give the locks back, when others have seen them."""
        held = [report.held for report in self._reports]
        self._ask(self._workers, [found and (locks.release,) for found in held])

    def reports(self) -> list[PathReport]:
        """Return what was found, by path."""
        return self._reports

    def close(self) -> None:
        """End the processes that tried."""
        for worker in [*self._workers, *self._others]:
            worker.close()

    def _folders(self) -> list[str | None]:
        return [
            report.looked.folder
            if isinstance(report.looked, PathFacts) and not report.looked.error
            else None
            for report in self._reports
        ]

    def _hdf5_files(self) -> list[str | None]:
        return [
            path
            if isinstance(report.looked, PathFacts) and report.looked.is_hdf5
            else None
            for path, report in zip(self.paths, self._reports, strict=True)
        ]

    def _set(self, field: str, function: Any, arguments: Sequence[Any]) -> None:
        """Call a function for each path that has an argument, and keep the outcome."""
        usable = [
            None if argument is None or isinstance(argument, Failure) else argument
            for argument in arguments
        ]
        calls = [None if a is None else (function, a) for a in usable]
        found = self._ask(self._workers, calls)
        self._reports = [
            report._replace(**{field: outcome})
            for report, outcome in zip(self._reports, found, strict=True)
        ]

    def _ask(self, workers: Sequence[Worker], calls: Sequence[Any]) -> list[Any]:
        """Call at the same time, so that one dead path does not delay the others."""
        for worker, call in zip(workers, calls, strict=True):
            if call:
                worker.ask(*call)
        deadline = time.monotonic() + self._seconds
        return [
            worker.answer(deadline) if call else None
            for worker, call in zip(workers, calls, strict=True)
        ]


def check_path(
    reports: Mapping[int, PathReport], path: str, locking: str | None
) -> list[Finding]:
    """Return rows on one path.

    Args:
      reports: by rank.
      path: its name, for the rows.
      locking: the variable HDF5_USE_FILE_LOCKING.
    """
    errors = {}
    for rank, report in reports.items():
        looked = report.looked
        text = looked.text if isinstance(looked, Failure) else looked.error
        if text:
            errors[rank] = text
    if errors:
        is_everywhere = len(errors) == len(reports)
        found = by_rank(errors) if is_everywhere else name_each(errors)
        remedy = (
            "correct the path, or see that it is mounted, and answers, on every node"
        )
        return [Finding(Status.FAIL, path, found, remedy)]
    facts = {
        rank: report.looked
        for rank, report in reports.items()
        if isinstance(report.looked, PathFacts)
    }
    rows = [_describe(path, facts)]
    rows += _check_opening(path, {r: report.opened for r, report in reports.items()})
    rows += _check_writing(path, {r: report.written for r, report in reports.items()})
    held = next((r.held for r in reports.values() if r.held is not None), None)
    seen = {rank: r.seen for rank, r in reports.items() if r.seen is not None}
    return rows + _check_locks(path, held, seen, locking)


def _describe(path: str, facts: Mapping[int, PathFacts]) -> Finding:
    """Return a row on the file system."""
    kinds = {}
    for rank, fact in facts.items():
        mount = fact.mount
        kinds[rank] = "of an unknown type"
        if mount is not None:
            kinds[rank] = f"{mount.kind} ({mount.source} on {mount.point})"
    least = min(facts.values(), key=lambda fact: fact.free_bytes)
    space = f"{as_text(least.free_bytes)} free of {as_text(least.size_bytes)}"
    found = f"{by_rank(kinds)}, {space}"
    if len({fact.mount.kind for fact in facts.values() if fact.mount}) > 1:
        remedy = "mount the same file system on every node"
        return Finding(Status.WARN, path, found, remedy)
    if least.free_bytes < _LITTLE * least.size_bytes:
        return Finding(Status.WARN, path, found, "make room there")
    return Finding(Status.OK, path, found)


def _check_opening(
    path: str, opened: Mapping[int, str | Failure | None]
) -> list[Finding]:
    """Return a row on reading, if it is an HDF5 file."""
    outcomes = {rank: found for rank, found in opened.items() if found is not None}
    if not outcomes:
        return []
    wrong = {r: _text(found) for r, found in outcomes.items() if _text(found)}
    if not wrong:
        return [Finding(Status.OK, f"{path}: HDF5", "can be read")]
    remedy = (
        f"a file is damaged, or being written; if locking is refused set {_LOCKING}"
    )
    return [
        Finding(Status.FAIL, f"{path}: HDF5", name_each(wrong), f"{remedy}=BEST_EFFORT")
    ]


def _text(found: str | Failure) -> str:
    return found.text if isinstance(found, Failure) else found


def _check_writing(
    path: str, written: Mapping[int, tuple[int, str] | Failure | None]
) -> list[Finding]:
    """Return a row on what checkpoints do."""
    what = f"{path}: writing"
    outcomes = {rank: found for rank, found in written.items() if found is not None}
    broken, read_only = {}, {}
    for rank, found in outcomes.items():
        if isinstance(found, Failure):
            broken[rank] = found.text
        elif found[0] < 0 and -found[0] not in _TROUBLES:
            read_only[rank] = found[1]
        elif found[0]:
            broken[rank] = found[1]
    if broken:
        remedy = "checkpoints would be lost: make room, or use another file system"
        return [Finding(Status.FAIL, what, name_each(broken), remedy)]
    if read_only:
        remedy = "data can be read there; choose another folder for checkpoints and "
        remedy += "Hdf5Writer, or change who may write"
        return [Finding(Status.WARN, what, name_each(read_only), remedy)]
    if not outcomes:
        return []
    found_text = "write, fsync, rename and memory maps work"
    return [Finding(Status.OK, what, found_text)]


def _check_locks(
    path: str,
    held: dict[str, tuple[str, str]] | Failure | None,
    answers: Mapping[int, dict[str, str] | Failure],
    locking: str | None,
) -> list[Finding]:
    """Return rows on the locks that one rank held and others should have seen."""
    what = f"{path}: locks"
    failed = {r: s.text for r, s in answers.items() if isinstance(s, Failure)}
    seen = {r: s for r, s in answers.items() if not isinstance(s, Failure)}
    if isinstance(held, Failure):
        failed[0] = held.text
    remedy = f"set {_LOCKING}=FALSE, so that HDF5 does not ask for locks"
    if failed or isinstance(held, Failure):
        return [Finding(Status.FAIL, what, name_each(failed), remedy)]
    if held is None:
        return []
    good, rows = [], []
    for kind, (_, refused) in held.items():
        said = {r: found[kind] for r, found in seen.items() if kind in found}
        row = _check_lock(what, kind, refused, said, locking)
        if row is None:
            good.append(kind)
        else:
            rows.append(row)
    if good:
        by = "another process" if len(seen) < 2 and 0 in seen else name_ranks(seen)
        verb = "sees" if len(seen) < 2 else "see"
        text = f"{by} {verb} those of rank 0: {', '.join(good)}"
        rows.insert(0, Finding(Status.OK, what, text))
    # A file that others do not see is one fact, not three
    return list(dict.fromkeys(rows))


def _check_lock(
    what: str, kind: str, refused: str, said: Mapping[int, str], locking: str | None
) -> Finding | None:
    """Return a row if something is wrong with one kind of lock."""
    is_off = kind == "HDF5" and locking in ("FALSE", "0")
    remedy = "mount the file system with locks (Lustre: flock; NFS: without nolock)"
    is_ours = f", or set {_LOCKING}=FALSE on all ranks"
    if refused or any(text not in _ANSWERS for text in said.values()):
        texts = {0: refused} if refused else said
        status = Status.FAIL if kind == "HDF5" else Status.WARN
        remedy += is_ours if kind == "HDF5" else ""
        return Finding(status, what, f"{kind} is refused: {name_each(texts)}", remedy)
    hidden = [rank for rank, text in said.items() if text == locks.HIDDEN]
    if hidden:
        text = f"{name_ranks(hidden)} do not see the files of rank 0"
        remedy = "use this path only for files of one node each: it is not shared"
        return Finding(Status.WARN, what, text, remedy)
    missed = [rank for rank, text in said.items() if text == locks.MISSED]
    if missed and not is_off:
        text = f"{kind}: a lock of rank 0 does not keep out {name_ranks(missed)}"
        return Finding(
            Status.WARN, what, text, f"{remedy}; or let one rank write a file"
        )
    if is_off:
        text = f"HDF5 does not lock files ({_LOCKING}={locking})"
        return Finding(Status.OK, what, text)
    return None


_ANSWERS = (locks.HELD, locks.MISSED, locks.HIDDEN)
