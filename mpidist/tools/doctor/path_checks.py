"""Paths of a job's files: whether all ranks can read, write and lock files there."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpidist.tools.doctor import file_systems
from mpidist.tools.doctor.children import Child, run_checks
from mpidist.tools.doctor.file_systems import HELD, HIDDEN, MISSED, PathFacts
from mpidist.tools.doctor.results import (
    CheckResult,
    Failure,
    Status,
    by_rank,
    name_each,
    name_ranks,
)
from mpidist.util.available_memory import as_text

__all__ = ["PathReport", "PathTrials", "check_path", "try_alone"]

# Errors of creating a file that have other reasons than permissions
_TROUBLES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.ENFILE)
_LOCKING = "HDF5_USE_FILE_LOCKING"
_LITTLE = 0.01
_STATES = (HELD, MISSED, HIDDEN)


class PathReport(NamedTuple):
    """The facts of one path on one rank; None for what was not checked.

    Args:
      looked: see `file_systems.look`.
      opened: see `file_systems.open_hdf5`.
      written: see `file_systems.write`.
      held: see `file_systems.hold`.
      seen: see `file_systems.see`.
    """

    looked: PathFacts | Failure
    opened: str | Failure | None = None
    written: tuple[int, str] | Failure | None = None
    held: dict[str, tuple[str, str]] | Failure | None = None
    seen: dict[str, str] | Failure | None = None


class PathTrials:
    """The checks of all paths by one rank. Close it, which releases its locks.

    All paths are checked at the same time, so that a dead one does not delay others.

    Args:
      paths: to check.
      seconds: how long each check may take.
    """

    def __init__(self, paths: Sequence[str], seconds: float):
        self.paths = paths
        self.reports: list[PathReport] = []
        self._seconds = seconds
        self._holders = contextlib.ExitStack()

    def __enter__(self) -> PathTrials:
        return self

    def __exit__(self, *_: object) -> None:
        self._holders.close()

    @property
    def held(self) -> list[Any]:
        """The locks that this rank holds, by path; see `file_systems.hold`."""
        return [report.held for report in self.reports]

    def look(self, is_writer: bool, is_holder: bool) -> None:
        """Access the paths, open HDF5 files, and perhaps write and hold locks."""
        calls = [(file_systems.look, path) for path in self.paths]
        looked = run_checks(calls, self._seconds)
        self.reports = [PathReport(found) for found in looked]
        found = [f if isinstance(f, PathFacts) else PathFacts() for f in looked]
        files = [
            path if facts.is_hdf5 else None
            for path, facts in zip(self.paths, found, strict=True)
        ]
        self._check("opened", file_systems.open_hdf5, files)
        if is_writer:
            folders = [facts.folder or None for facts in found]
            self._check("written", file_systems.write, folders)
        if is_holder:
            self._hold(found)

    def see(self, held: Sequence[Any]) -> None:
        """Check whether the locks of another process are seen, by path."""
        known = [None if isinstance(locks, Failure) else locks for locks in held]
        self._check("seen", file_systems.see, known)

    def _hold(self, found: Sequence[PathFacts]) -> None:
        holders = [
            self._holders.enter_context(Child(file_systems.hold, facts.folder))
            if report.written == (0, "")
            else None
            for facts, report in zip(found, self.reports, strict=True)
        ]
        self._set(
            "held", [holder and holder.result(self._seconds) for holder in holders]
        )

    def _check(
        self, field: str, function: Callable[..., Any], arguments: Sequence[Any]
    ) -> None:
        """Call a function for each path that has an argument."""
        calls = [None if a is None else (function, a) for a in arguments]
        self._set(field, run_checks(calls, self._seconds))

    def _set(self, field: str, values: Sequence[Any]) -> None:
        self.reports = [
            report._replace(**{field: value})
            for report, value in zip(self.reports, values, strict=True)
        ]


def try_alone(paths: Sequence[str], seconds: float) -> list[PathReport]:
    """Check paths by this process alone; a second child looks at the locks."""
    with PathTrials(paths, seconds) as trials:
        trials.look(is_writer=True, is_holder=True)
        trials.see(trials.held)
        return trials.reports


def check_path(
    reports: Mapping[int, PathReport], path: str, locking: str | None
) -> list[CheckResult]:
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
            "correct the path, or check that it is mounted and responds on every node"
        )
        return [CheckResult(Status.FAIL, path, found, remedy)]
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


def _describe(path: str, facts: Mapping[int, PathFacts]) -> CheckResult:
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
        return CheckResult(Status.WARN, path, found, remedy)
    if least.free_bytes < _LITTLE * least.size_bytes:
        return CheckResult(Status.WARN, path, found, "make room there")
    return CheckResult(Status.OK, path, found)


def _check_opening(
    path: str, opened: Mapping[int, str | Failure | None]
) -> list[CheckResult]:
    """Return a row on reading, if it is an HDF5 file."""
    outcomes = {rank: found for rank, found in opened.items() if found is not None}
    if not outcomes:
        return []
    wrong = {r: _text(found) for r, found in outcomes.items() if _text(found)}
    if not wrong:
        return [CheckResult(Status.OK, f"{path}: HDF5", "can be read")]
    remedy = (
        f"a file is damaged or being written; if locking is refused, set {_LOCKING}"
    )
    return [
        CheckResult(
            Status.FAIL, f"{path}: HDF5", name_each(wrong), f"{remedy}=BEST_EFFORT"
        )
    ]


def _text(found: str | Failure) -> str:
    return found.text if isinstance(found, Failure) else found


def _check_writing(
    path: str, written: Mapping[int, tuple[int, str] | Failure | None]
) -> list[CheckResult]:
    """Return a row on writing, as checkpoints do."""
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
        return [CheckResult(Status.FAIL, what, name_each(broken), remedy)]
    if read_only:
        remedy = "the folder is read-only: choose another one for checkpoints and "
        remedy += "Hdf5Writer, or change the permissions"
        return [CheckResult(Status.WARN, what, name_each(read_only), remedy)]
    if not outcomes:
        return []
    found_text = "write, fsync and rename work"
    return [CheckResult(Status.OK, what, found_text)]


def _check_locks(
    path: str,
    held: dict[str, tuple[str, str]] | Failure | None,
    answers: Mapping[int, dict[str, str] | Failure],
    locking: str | None,
) -> list[CheckResult]:
    """Return rows on the locks that rank 0 held and other ranks should have seen."""
    what = f"{path}: locks"
    failed = {r: s.text for r, s in answers.items() if isinstance(s, Failure)}
    seen = {r: s for r, s in answers.items() if not isinstance(s, Failure)}
    if isinstance(held, Failure):
        failed[0] = held.text
    remedy = f"set {_LOCKING}=FALSE, so that HDF5 does not ask for locks"
    if failed or isinstance(held, Failure):
        return [CheckResult(Status.FAIL, what, name_each(failed), remedy)]
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
        rows.insert(0, CheckResult(Status.OK, what, text))
    # A file that is not visible gives one row, not one per kind
    return list(dict.fromkeys(rows))


def _check_lock(
    what: str, kind: str, refused: str, said: Mapping[int, str], locking: str | None
) -> CheckResult | None:
    """Return a row if something is wrong with one kind of lock."""
    is_off = kind == "HDF5" and locking in ("FALSE", "0")
    remedy = "mount the file system with locks (Lustre: flock; NFS: without nolock)"
    is_ours = f", or set {_LOCKING}=FALSE on all ranks"
    if refused or any(text not in _STATES for text in said.values()):
        texts = {0: refused} if refused else said
        status = Status.FAIL if kind == "HDF5" else Status.WARN
        remedy += is_ours if kind == "HDF5" else ""
        return CheckResult(
            status, what, f"{kind} is refused: {name_each(texts)}", remedy
        )
    hidden = [rank for rank, text in said.items() if text == HIDDEN]
    if hidden:
        verb = "does" if len(hidden) == 1 else "do"
        text = f"{name_ranks(hidden)} {verb} not see the files of rank 0"
        remedy = "use this path only for files of one node each: it is not shared"
        return CheckResult(Status.WARN, what, text, remedy)
    missed = [rank for rank, text in said.items() if text == MISSED]
    if missed and not is_off:
        text = f"{kind}: a lock of rank 0 does not keep out {name_ranks(missed)}"
        return CheckResult(
            Status.WARN, what, text, f"{remedy}; or let one rank write a file"
        )
    if is_off:
        text = f"HDF5 does not lock files ({_LOCKING}={locking})"
        return CheckResult(Status.OK, what, text)
    return None
