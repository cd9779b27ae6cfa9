"""The checkpoints of a folder: their names, their order, what may be removed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from mpidist.checkpoint import files
from mpidist.checkpoint.files import is_locked, removal, remove
from mpidist.checkpoint.reading import read_header, read_tree
from mpidist.errors import ArgumentError, CheckpointError
from mpidist.util import validation
from mpidist.util.files import SHARD_PATTERN, is_abandoned, shard_name
from mpidist.util.notices import warn

__all__ = [
    "SUFFIX",
    "Saved",
    "find",
    "find_sound",
    "index_path",
    "name_of",
    "next_serial",
    "remove_checkpoint",
    "remove_other_shards",
    "remove_rests",
    "require_name",
    "shard_names",
    "warn_skipped",
]

SUFFIX = ".h5"
_LONGEST = 128  # name of checkpoints, in bytes: those of their files have more
_SHARD = rf"-(?P<token>[0-9a-f]{{8}}){SHARD_PATTERN}"


class Saved(NamedTuple):
    """A checkpoint of a folder. They sort in the order of their saving."""

    serial: int
    number: int
    path: Path
    modified: float  # seconds since 1970


def index_path(path: str | os.PathLike[str], argument: str) -> Path:
    """Return the file that a path with or without its suffix stands for.

    Raises:
      ArgumentError, ArgumentTypeError: it is no path; they name the argument.
    """
    text = validation.path(argument, path)
    return Path(text if text.endswith(SUFFIX) else text + SUFFIX).absolute()


def require_name(name: str) -> str:
    """Return the name of checkpoints if files can begin with it.

    Raises:
      ArgumentError: they cannot.
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


def shard_names(index: Path, token: str, count: int) -> list[str]:
    """Return the names of all shards; a token tells savings to one path apart."""
    stem = f"{index.stem}-{token}"
    return [shard_name(stem, rank, count, SUFFIX) for rank in range(count)]


def find(folder: Path, name: str, *, warns: bool = False) -> list[Saved]:
    """Return the checkpoints `name-<number>.h5` in the order of their saving.

    Those with damaged headers are left out, with a warning if `warns`.
    """
    found = []
    pattern = re.compile(rf"{re.escape(name)}-(\d+){re.escape(SUFFIX)}")
    for file in _names(folder):
        if match := pattern.fullmatch(file):
            path = folder / file
            try:
                serial = read_header(path).serial
                modified = path.stat().st_mtime
            except (CheckpointError, OSError) as error:
                if warns:
                    warn_skipped(error)
            else:
                found.append(Saved(serial, int(match[1]), path, modified))
    return sorted(found)


def find_sound(folder: Path, name: str) -> list[Saved]:
    """Return the checkpoints up to the last one that is not damaged.

    Large arrays are not looked at. Those that are damaged are skipped with a warning.
    """
    found = find(folder, name, warns=True)
    while found:
        try:
            read_tree(found[-1].path)
        except CheckpointError as error:
            warn_skipped(error)
            del found[-1]
        else:
            break
    return found


def warn_skipped(error: Exception) -> None:
    """Warn that a checkpoint is passed over."""
    warn(f"skipped: {error}", stacklevel=2)


def name_of(index: Path) -> str:
    """Return the name of the checkpoints of which this is one, without its number."""
    name, _, number = index.stem.rpartition("-")
    return name if name and number.isdecimal() else index.stem


def next_serial(index: Path) -> int:
    """Return the serial of the next checkpoint beside those that there are.

    Raises:
      CheckpointError: another job saves checkpoints of that name there.
    """
    name = name_of(index)
    newest: Path | None = None
    if name != index.stem:
        found = find(index.parent, name)
        newest = found[-1].path if found else None
    elif index.exists():
        newest = index
    try:
        header = read_header(newest) if newest is not None else None
    except CheckpointError:  # damaged, and about to be replaced; or just removed
        header = None
    serial = 0 if header is None else header.serial
    job = "" if header is None else header.job
    files.require_alone(index, name, newest, serial, job)
    return serial + 1 if name != index.stem else 1


def remove_checkpoint(index: Path) -> None:
    """Remove a checkpoint: its index first, so that there is never half of one."""
    removal.remove(index)
    remove_other_shards(index, "")


def remove_other_shards(index: Path, token: str) -> None:
    """Remove the shards of former checkpoints of the same path."""
    pattern = re.compile(re.escape(index.stem) + _SHARD + re.escape(SUFFIX))
    for file in _names(index.parent):
        match = pattern.fullmatch(file)
        if match and match["token"] != token and not is_locked(index.parent / file):
            removal.remove(index.parent / file)


def remove_rests(folder: Path, name: str, in_use: Iterable[str] = ()) -> None:
    """Remove what dead jobs left: temporary files, and shards without an index.

    Args:
      folder: where.
      name: of the checkpoints.
      in_use: tokens of shards that are being saved by this process.
    """
    stem = rf"(?P<stem>{re.escape(name)}-\d+)"
    shard = re.compile(stem + _SHARD + re.escape(SUFFIX))
    any_file = rf"{stem}({_SHARD})?{re.escape(SUFFIX)}"
    names = _names(folder)
    for file in names:
        match = shard.fullmatch(file)
        is_lost = match is not None and match["token"] not in in_use
        if match and is_lost and f"{match['stem']}{SUFFIX}" in names:
            is_lost = _is_of_another(folder / f"{match['stem']}{SUFFIX}", file)
        is_lost = is_lost or is_abandoned(file, any_file)
        if is_lost and not is_locked(folder / file):  # by a running job, on any host
            remove(folder / file)


def _is_of_another(index: Path, shard: str) -> bool:
    """Return whether an index is sound, and does not name the shard."""
    try:
        return shard not in {found.name for found in read_header(index).shards}
    except CheckpointError:
        return False


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from error
