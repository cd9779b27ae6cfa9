"""The files of the flight recorder: ring buffers of calls, and their descriptions.

A ring has `CALLS` rows of `WORDS` integers of 64 bits: the number of the call, from 1;
its kind; when it began, and when it ended or 0, in nanoseconds on the clock of
time.monotonic; and its step, -1 if none. The other file has a line of JSON about the
rank, then one for each kind of call, with the kind's number. File names contain the
number of the communicator (not unique over all ranks), the rank in the world, and the
number of the job, since several jobs may have the same folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpidist.util.files import replace_file

FORMAT = 3
CALLS = 1000
WORDS = 5
# Columns of a row in the ring; each row is one call.
NUMBER, KIND, BEGUN, ENDED, STEP = range(WORDS)
RING_BYTES = 8 * WORDS * CALLS
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
# The text of one kind of call is cut, so that a nest of many arrays fits
_MOST_TEXT = 400
_MOST_AGREED = 1600


def ring_path(folder: Path, job: int, channel: int, rank: int) -> Path:
    """Return the file of a ring."""
    return folder / f"channel-{channel}-rank-{rank:05}-job-{job:016x}.ring"


def calls_path(folder: Path, job: int, channel: int, rank: int) -> Path:
    """Return the file of the descriptions."""
    return ring_path(folder, job, channel, rank).with_suffix(".jsonl")


class FlightFiles:
    """Both files of one rank and communicator, open for writing.

    Whatever has their names already is refused: others may write to the folder.

    Args:
      folder: the folder; created if missing.
      job: a number of the job.
      channel: the number of the communicator.
      rank: in the world.
      header: the first line of the text.

    Attributes:
      ring: the ring, mapped into memory; all of its pages exist.

    Raises:
      OSError: the files cannot be created.
    """

    def __init__(
        self, folder: Path, job: int, channel: int, rank: int, header: Mapping[str, Any]
    ):
        folder = folder.absolute()  # the program may change its own later
        self._ring_path = ring_path(folder, job, channel, rank)
        self._text_path = calls_path(folder, job, channel, rank)
        self._header = _line(header)
        self._text = -1
        self._made: list[Path] = []
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # The ring before the text: a reader that finds text finds a ring, too.
            self.ring = self._make_ring()
            self._text = self._create(self._text_path)
            _write(self._text, self._header)
        except BaseException:
            self.close(is_kept=False)
            raise

    def _create(self, path: Path) -> int:
        file = _create(path)
        self._made.append(path)
        return file

    def _make_ring(self) -> mmap.mmap:
        file = self._create(self._ring_path)
        try:
            # A page without disk space would end the process with SIGBUS
            _reserve(file, RING_BYTES)
            return mmap.mmap(file, RING_BYTES)
        finally:
            # The mapping keeps the file alive.
            os.close(file)

    def add(
        self,
        kind: int,
        operation: str,
        site: str,
        agreed: Mapping[str, str],
        digest: int,
    ) -> None:
        """Write the description of a kind of call.

        Args:
          kind: its number.
          operation: the user's call.
          site: its file and line.
          agreed: the arguments that ranks compare.
          digest: of the arguments, since long ones are truncated.

        Raises:
          OSError: it cannot be written.
        """
        line = {
            "kind": kind,
            "operation": operation,
            "site": site,
            "agreed": dict(_abridge(agreed)),
            "digest": digest,
        }
        _write(self._text, _line(line))

    def keep(self, kinds: Collection[int]) -> None:
        """Remove all kinds of calls except these.

        The file is replaced atomically, so that a reader always finds it complete.

        Raises:
          OSError: it cannot be written.
        """
        # Line 0 is the header, which is written again.
        lines = self._text_path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines[1:] if json.loads(line)["kind"] in kinds]
        with replace_file(self._text_path, is_durable=False) as file:
            file.write(b"".join([self._header, *kept]))
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        former, self._text = self._text, os.open(self._text_path, flags)
        os.close(former)

    def detach(self) -> None:
        """Leave the files to the parent of this forked process."""
        # An empty list: the child closes its copies and removes nothing.
        self._made.clear()
        self.close(is_kept=True)

    def close(self, is_kept: bool) -> None:
        """Close the files; remove them unless `keep`."""
        if self._text >= 0:
            with contextlib.suppress(OSError):
                os.close(self._text)
            self._text = -1
        for path in [] if is_kept else self._made:
            with contextlib.suppress(OSError):
                path.unlink()


def _create(path: Path) -> int:
    """Return a new file that is open for reading and writing."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def _reserve(file: int, size_bytes: int) -> None:
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except AttributeError:  # not on macOS
        _write(file, bytes(size_bytes))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        _write(file, bytes(size_bytes))


def _write(file: int, data: bytes) -> None:
    # os.write may write less than it was given.
    while data:
        data = data[os.write(file, data) :]


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _abridge(agreed: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    left = _MOST_AGREED
    for count, (name, text) in enumerate(agreed.items()):
        if left <= 0:
            yield "...", f"{len(agreed) - count} more"
            return
        name, text = (
            s[:_MOST_TEXT] + "..." * (len(s) > _MOST_TEXT) for s in (name, text)
        )
        left -= len(name) + len(text)
        yield name, text
