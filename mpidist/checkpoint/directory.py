"""The checkpoints of a directory: names, order, locks and removal.

One job at a time may save under a name. It holds a lock on its latest checkpoint until
it ends or its strategy is closed. The serial in the header orders the checkpoints,
whatever their numbers and times.

A file is ours if it begins as those of checkpoints do; no other is replaced or removed,
whatever its name. A shard is removed only if no index of the directory needs it, under
whatever name, and nobody writes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from mpidist.checkpoint.format import (
    DamagedError,
    ForeignError,
    Header,
    MissingError,
    damage,
    is_begun,
    is_locked,
    locked,
    open_file,
    read_header,
    read_shard,
    unlock,
)
from mpidist.checkpoint.reading import read_tree
from mpidist.errors import ArgumentError, CheckpointError
from mpidist.launch.launchers import describe_job
from mpidist.util import validation
from mpidist.util.files import (
    SHARD_PATTERN,
    AtomicFile,
    close,
    is_running,
    open_regular,
    shard_name,
    sync_directory,
    writer_of,
)
from mpidist.util.logs import warn
from mpidist.util.mounts import lateness

SUFFIX = ".h5"
# How long a network file system may show a node an old list of a directory
LOOK_SECONDS = 10.0
# A save cannot take longer, where nothing else tells whether it has ended
_LONGEST_SAVE_SECONDS = 86_400.0
_LONGEST = 128  # bytes of a name: shards and temporary files add to it
_SHARD = rf"-[0-9a-f]{{8}}{SHARD_PATTERN}"


class Known(NamedTuple):
    """The state that a manager continues from, for its first save.

    Args:
      serial: of the latest checkpoint that there was when it looked for one.
      path: of the checkpoint that was restored last.
      is_restored: whether it looked in order to restore one.
    """

    serial: int
    path: Path | None
    is_restored: bool


class Saved(NamedTuple):
    """A checkpoint of a directory. They sort in the order of saving."""

    serial: int
    number: int
    path: Path
    modified: float  # seconds since 1970
    preserved: tuple[int, float] | None = None  # see `Header`
    job: str = ""  # that saved it


def index_path(path: str | os.PathLike[str], argument: str) -> Path:
    """Return the path of the index, given with or without its suffix.

    Raises:
      ArgumentError, ArgumentTypeError: not a path; the message names the argument.
    """
    text = validation.path(argument, path)
    text = text if text.endswith(SUFFIX) else text + SUFFIX
    return validation.absolute(argument, text)


def require_name(name: str) -> str:
    """Return the name if it is valid as the first part of file names.

    Raises:
      ArgumentError: it is not.
    """
    is_name = isinstance(name, str) and "/" not in name
    if (
        not is_name
        or len(os.fsencode(validation.path("checkpoint_name", name))) > _LONGEST
    ):
        raise ArgumentError(
            f"checkpoint_name must be the name of a file, not {validation.shown(name)}"
        )
    return name


def shard_names(index: Path, id: str, count: int) -> list[str]:
    """Return the names of all shards of a save; they begin with a part of its id."""
    stem = f"{index.stem}-{id[:8]}"
    return [shard_name(stem, rank, count, SUFFIX) for rank in range(count)]


def find_names(directory: Path) -> set[str]:
    """Return the names, without numbers, of the checkpoints in a directory.

    Files that do not begin as checkpoints are ignored.
    """
    pattern = re.compile(rf"(?P<name>.+)-\d+{re.escape(SUFFIX)}")
    shard = re.compile(f".+{_SHARD}{re.escape(SUFFIX)}")
    matches = [pattern.fullmatch(file) for file in _names(directory)]
    return {
        match["name"]
        for match in matches
        if match and not shard.fullmatch(match[0]) and _may_be(directory / match[0])
    }


def _may_be(path: Path) -> bool:
    """Return whether a file is a checkpoint, or cannot be read now."""
    try:
        return _header_at(path) is not None
    except (CheckpointError, OSError):
        return True


def find(
    directory: Path, name: str, on_skip: Callable[[Exception], None] | None = None
) -> list[Saved]:
    """Return the checkpoints `name-<number>.h5` in the order of saving.

    Args:
      directory: where they are.
      name: the first part of their names.
      on_skip: called for each with a damaged header, which is skipped.

    Raises:
      CheckpointError: one cannot be read now.
    """
    pattern = re.compile(rf"{re.escape(name)}-(\d+){re.escape(SUFFIX)}")
    deadline: float | None = None
    while True:
        files = filter(None, map(pattern.fullmatch, _names(directory)))
        checkpoints, errors = [], {}
        for match in files:
            try:
                checkpoints.append(_inspect(directory / match[0], int(match[1])))
            except DamagedError as error:
                errors[match[0]] = error
        # If another job has removed some meanwhile, it has also saved new ones
        gone = {n for n, e in errors.items() if isinstance(e, MissingError)}
        if not gone:
            break
        if deadline is None:
            deadline = time.monotonic() + lateness(directory, LOOK_SECONDS)
        if gone <= _names(directory):  # this list is old, or it is a link to nothing
            if time.monotonic() >= deadline:
                break
            time.sleep(_POLL_SECONDS)
    if on_skip is not None:
        for skipped in errors.values():
            on_skip(skipped)
    return sorted(checkpoints)


# By path: the file's identity and times, and its header, or None of another file. A
# checkpoint is replaced by a new file, and never changed.
_inspected: dict[Path, tuple[tuple[int, ...], Header | None]] = {}
_MOST_INSPECTED = 10_000


def _inspect(path: Path, number: int) -> Saved:
    """Return a checkpoint; its header is read again only if the file is another."""
    try:
        status = path.stat()
    except Exception:
        with damage(path):
            raise
    header = _header_at(path, status)
    return _saved(path, number, status, header or read_header(path))


def _saved(path: Path, number: int, status: os.stat_result, header: Header) -> Saved:
    modified, preserved = status.st_mtime, header.preserved
    return Saved(header.serial, number, path, modified, preserved, header.job)


def _header_at(path: Path, status: os.stat_result | None = None) -> Header | None:
    """Return the header of a file, without its blocks; None if it is not ours.

    Raises:
      CheckpointError: it cannot be read, or is damaged.
      OSError: there is none, or it cannot be looked at.
    """
    now = _identity(status or path.stat())
    known = _inspected.get(path)
    if known is not None and known[0] == now:
        return known[1]
    try:
        header = read_header(path)
    except ForeignError:
        header = None
    _remember(path, now, header)
    return header


def _remember(path: Path, now: tuple[int, ...], header: Header | None) -> None:
    if len(_inspected) >= _MOST_INSPECTED:
        _inspected.clear()
    _inspected[path] = now, header and dataclasses.replace(header, data=())


def _identity(status: os.stat_result) -> tuple[int, ...]:
    times = status.st_mtime_ns, status.st_ctime_ns
    return status.st_dev, status.st_ino, status.st_size, *times


def find_undamaged(
    directory: Path,
    name: str,
    on_skip: Callable[[Exception], None],
    damaged: Container[Saved] = (),
) -> tuple[list[Saved], int]:
    """Return the checkpoints up to the last undamaged one, and the latest serial.

    Large arrays are not checked.

    Args:
      directory: where they are.
      name: the first part of their names.
      on_skip: called for each that is damaged.
      damaged: those that are known to be damaged.

    Raises:
      CheckpointError: one cannot be read now.
    """
    unreadable: set[Saved] = set()
    while True:
        checkpoints = find(directory, name, on_skip)
        serial = checkpoints[-1].serial if checkpoints else 0
        while checkpoints:
            newest = checkpoints[-1]
            if newest not in damaged and newest not in unreadable:
                break
            checkpoints.pop()
        else:
            return [], serial
        try:
            read_tree(newest.path)
        except DamagedError as error:
            # If it was removed meanwhile, there are others now
            if newest.path.exists():
                on_skip(error)
                unreadable.add(newest)
        else:
            return checkpoints, serial


def warn_skipped(error: Exception) -> None:
    """Warn that a checkpoint is skipped."""
    warn(f"skipped: {error}", stacklevel=2)


def _series(index: Path) -> tuple[tuple[str, str], int]:
    """Return directory and name of a checkpoint, and its number.

    The name is that of the file if it has no number; the number is 0 then.
    """
    name, _, number = index.stem.rpartition("-")
    is_numbered = name and number.isdecimal()
    key = os.path.realpath(index.parent), name if is_numbered else index.stem
    return key, int(number) if is_numbered else 0


def next_serial(
    index: Path, owner: int, known: Known | None = None
) -> tuple[int, list[Saved]]:
    """Return the serial of the next checkpoint, and those of its name that there are.

    Args:
      index: the checkpoint to be saved.
      owner: id of the Saver.
      known: what its manager continues from; None after its first save.

    Raises:
      CheckpointError: another job saves under that name there, or has saved a newer
        state than this one continues from.
    """
    key, _ = _series(index)
    is_numbered = key[1] != index.stem
    held = _held.get(key)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        existing: list[Saved] = []
        if is_numbered:
            existing = find(index.parent, key[1])
        elif index.exists():
            existing = [Saved(0, 0, index, 0.0)]
            with contextlib.suppress(CheckpointError, OSError):  # damaged, or removed
                existing = [_inspect(index, 0)]
        if not existing:
            return 1, []
        newest = existing[-1]
        if held is not None and (held.saved, held.owner) == (newest, owner):
            break  # the usual case
        # What the other job has saved until it ended counts as well
        if not _wait_for_lock(index, newest, deadline):
            _require_newest(index, newest, owner, known)
            break
    return (newest.serial + 1 if is_numbered else 1), existing


class Before(NamedTuple):
    """What there is where a checkpoint is to be saved.

    Args:
      file: what tells the file at its path from any other; None if there is none.
      needs: of the checkpoint there; see `Header`.
      series: the paths of all of its name, if it has a number.
    """

    file: tuple[int, ...] | None
    needs: frozenset[str]
    series: frozenset[Path] = frozenset()


def look(index: Path) -> Before:
    """Return what there is at a path, where a checkpoint is to be saved.

    Raises:
      CheckpointError: a file that is no checkpoint.
      OSError: it cannot be looked at.
    """
    try:
        file = _of_file(index)
    except FileNotFoundError:
        return Before(None, frozenset())
    if _is_replaceable(index):
        return Before(file, _needs(index))
    raise CheckpointError(
        f"{index}: there is a file of that name that is no checkpoint, and it is not "
        "replaced; move it away, or save under another name"
    )


def _of_file(path: Path) -> tuple[int, ...]:
    # A new file may get the inode of one that was removed
    status = os.lstat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _is_replaceable(index: Path) -> bool:
    """Return whether a file is an index, perhaps a damaged one."""
    try:
        header = _header_at(index)
        return header is not None and header.is_index
    except (CheckpointError, OSError):
        with contextlib.suppress(CheckpointError), open_file(index) as descriptor:
            return is_begun(descriptor)
    return False


def publish(file: AtomicFile, before: Before) -> None:
    """Give an index its name: from now on the checkpoint exists.

    Args:
      file: of the index, complete.
      before: what there was when the save began.

    Raises:
      CheckpointError: another job has saved since; the file did not get its name.
      OSError: it did not get its name, as far as one can see.
    """
    (_, name), _ = _series(file.path)
    now = find(file.path.parent, name) if name != file.path.stem else []
    new = [saved for saved in now if saved.path not in before.series]
    with contextlib.suppress(FileExistsError, FileNotFoundError):
        is_same = before.file is None or _of_file(file.path) == before.file
        if is_same and all(saved.job == JOB for saved in new):
            file.publish(replaces=before.file is not None)
            return
    raise CheckpointError(
        f"{file.path}: another job has saved {new[0].path.name if new else 'it'} "
        "meanwhile, or removed it; only one job at a time may save under a name"
    )


def remove_checkpoints(outdated: Sequence[Saved], in_use: Container[str]) -> None:
    """Remove checkpoints of one directory: first the indexes, then their shards.

    `in_use`: see `remove_useless`.
    """
    ended: frozenset[str] = frozenset()
    for saved in outdated:
        with contextlib.suppress(CheckpointError, OSError):
            if _inspect(saved.path, saved.number) == saved:  # and no other
                ended |= _needs(saved.path)
                removal.remove(saved.path)
    if outdated:
        stems = "|".join(re.escape(saved.path.stem) for saved in outdated)
        remove_useless(outdated[0].path.parent, stems, in_use, ended)


def remove_useless(
    directory: Path,
    stems: str,
    in_use: Container[str],
    ended: frozenset[str] = frozenset(),
) -> None:
    """Remove shards without an index, and what dead jobs did not complete.

    Args:
      directory: of the checkpoints.
      stems: a regular expression for the names of their indexes, without suffixes.
      in_use: ids of the saves in progress in this process.
      ended: the needs of indexes that this job has removed or replaced.
    """
    end = re.escape(SUFFIX)
    shard = re.compile(f"(?P<stem>{stems}){_SHARD}{end}")
    found: list[tuple[Path, str, frozenset[str]]] = []
    for name in _names(directory):
        path = directory / name
        writer = writer_of(name, f"(?:{stems})(?:{_SHARD})?{end}")
        if writer is not None and _is_dead(path, writer):
            removal.remove(path, is_empty=True)
        match = shard.fullmatch(name)
        if match is None:
            continue
        with contextlib.suppress(CheckpointError):
            header, of_index = read_shard(path)
            marks = of_index.marks(header.id)
            is_ended = marks & ended or _is_dead(path, header.writer)
            if is_ended and not header.is_index and header.id not in in_use:
                found.append((path, match["stem"], marks))
    # Only now: an index may have got its name, or another one, since
    needed = _find_needed(directory) if found else None
    if needed is not None:
        for path, stem, marks in found:
            if stem not in needed and not marks & needed:
                removal.remove(path)


def _find_needed(directory: Path) -> set[str] | None:
    """Return the marks of shards that indexes need, and stems of damaged indexes.

    None if a file that may be an index cannot be read, or gets another name meanwhile.
    """
    needed: set[str] = set()
    shard = re.compile(f".+{_SHARD}{re.escape(SUFFIX)}")
    # Shards that an index names need not be read: those names come last
    for name in sorted(_names(directory), key=lambda n: shard.fullmatch(n) is not None):
        path = directory / name
        if name in needed:
            continue
        try:
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                header = _header_at(path, status)
                if header is not None and header.is_index:
                    needed |= header.needs | {shard.name for shard in header.shards}
        except (CheckpointError, OSError) as error:
            if _may_be_read_later(path, error):
                return None
            needed.add(path.stem)
    return needed


def _may_be_read_later(path: Path, error: Exception) -> bool:
    """Return whether a file that could not be read may be an index all the same."""
    with contextlib.suppress(OSError):
        if path.is_symlink():  # to what was removed here, or is not mounted now
            return os.path.dirname(os.readlink(path)) != ""
        if path.stat().st_uid != os.geteuid():
            return False
    return isinstance(error.__cause__ or error, OSError | MissingError)


def _needs(index: Path) -> frozenset[str]:
    """Return the marks of the shards that an index needs; none if it is unreadable."""
    try:
        header = _header_at(index)
    except (CheckpointError, OSError):
        return frozenset()
    return header.needs if header else frozenset()


def _is_dead(path: Path, writer: tuple[str, int] | None) -> bool:
    """Return whether nobody writes a file any more, or holds it."""
    if is_locked(path):  # on any host
        return False
    is_alive = is_running(*writer) if writer else None
    if is_alive is not None:
        return not is_alive
    # Locks of other hosts may be unknown here
    try:
        return time.time() - path.stat().st_mtime > _LONGEST_SAVE_SECONDS
    except OSError:
        return False


def _names(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error


def make_directory(directory: Path) -> None:
    """Create a directory and its missing parents, durably."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


class Removal:
    """Removes files: their names at once, their blocks in a thread.

    Freeing blocks can take as long as writing them.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def remove(self, path: Path, *, is_empty: bool = False) -> None:
        """Remove a file if it is ours, or empty where `is_empty`; ignore errors."""
        with contextlib.suppress(OSError):
            # An open descriptor delays the freeing of the blocks
            descriptor = open_regular(path)
            try:
                is_ours = is_begun(descriptor)
                if is_ours or (is_empty and not os.fstat(descriptor).st_size):
                    path.unlink()
            finally:
                self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        thread = threading.Thread(target=close, args=(descriptor,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there may be no more threads
            close(descriptor)
        else:
            self._threads.append(thread)

    def wait(self) -> None:
        """Wait until the blocks of removed files are free."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()


removal = Removal()


# How long a requeued job waits for the previous one to end
_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.1
_MOST_HELD = 64


def _describe_job() -> str:
    job = describe_job(os.environ)
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    where = f"process {os.getpid()} on host {os.uname().nodename[:64]}"
    return f"{job}{', ' * bool(job)}{where}, started {now}"


JOB = _describe_job()
WRITER = os.uname().nodename, os.getpid()  # see `Header`


class _Held(NamedTuple):
    """The latest checkpoint that this process saved under a name, locked."""

    descriptor: int
    saved: Saved
    owner: int  # id of the Saver


# By directory and name, in the order of saving
_held: dict[tuple[str, str], _Held] = {}


def hold(index: Path, descriptor: int, header: Header, owner: int) -> None:
    """Keep the lock on a complete checkpoint; release that on the previous one.

    Args:
      index: the checkpoint.
      descriptor: of the locked file; this module closes it.
      header: of the checkpoint, which need not be read again.
      owner: the argument for `release`.
    """
    try:
        key, number = _series(index)
        status = os.fstat(descriptor)
    except BaseException:
        unlock(descriptor)
        raise
    _remember(index, _identity(status), header)
    saved = _saved(index, number, status, header)
    former = _held.pop(key, None)
    _held[key] = _Held(descriptor, saved, owner)
    if former is not None:
        unlock(former.descriptor)
    while len(_held) > _MOST_HELD:
        unlock(_held.pop(next(iter(_held))).descriptor)


def release(owner: int) -> None:
    """Release the locks of `owner`, so that other jobs can save."""
    for key in [key for key, held in _held.items() if held.owner == owner]:
        unlock(_held.pop(key).descriptor)


def _wait_for_lock(index: Path, newest: Saved, deadline: float) -> bool:
    """Wait until the job that saved the latest checkpoint has ended, or saved another.

    Args:
      index: the checkpoint to be saved.
      newest: the latest checkpoint.
      deadline: when to give up, unless this job has saved before: then at once.

    Returns:
      Whether it had to wait.

    Raises:
      CheckpointError: that job is still running.
    """
    if _is_held(newest.path) or not is_locked(newest.path):
        return False
    while is_locked(newest.path):
        if _series(index)[0] in _held or time.monotonic() >= deadline:
            _refuse(index, newest, "is running")
        time.sleep(_POLL_SECONDS)
    return True


def _require_newest(
    index: Path, newest: Saved, owner: int, known: Known | None
) -> None:
    """Raise if the latest checkpoint is newer than what this job continues from.

    Raises:
      CheckpointError: it was saved after this job's last save or restore.
    """
    held = _held.get(_series(index)[0])
    if known is None:
        is_later = held is not None and newest.serial >= held.saved.serial
        if is_later and newest.job != JOB:
            _refuse(index, newest, "saved it after this job's last save")
        return
    if newest.serial <= known.serial or newest.path == known.path:
        return
    # Several managers of one job may save in turn, unless they restored another state
    is_ours = held is not None and held.owner == owner
    if newest.job == JOB and (is_ours or not known.is_restored):
        return
    since = f"restored {known.path.name}" if known.path else "looked for checkpoints"
    job = newest.job or "a job of an older version"
    raise CheckpointError(
        f"{index}: {newest.path.name} was saved by {job} after this job {since}, and a "
        "checkpoint of this job would hide it. Restore again (restore_or_initialize "
        "takes the latest), or save under another name or in another directory"
    )


def _refuse(index: Path, newest: Saved, why: str) -> NoReturn:
    raise CheckpointError(
        f"{index}: another job saves checkpoints {_series(index)[0][1]!r} in this "
        f"directory: {newest.job or 'one of an older version'}. It has saved "
        f"{newest.path.name}, and {why}. This job is {JOB}. End one of them, or use "
        "different directories"
    )


def _is_held(path: Path) -> bool:
    try:
        status = path.stat()
        return any(os.path.samestat(status, os.fstat(one)) for one in list(locked))
    except OSError:
        return False


os.register_at_fork(after_in_child=_held.clear)
