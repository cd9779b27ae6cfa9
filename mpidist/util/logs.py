"""Logging: the loggers `mpidist.*`, and what writes their records to stderr.

An application that configures `logging` gets all records, by its own levels, handlers
and formats, and nothing is written beside them, unless MPIDIST_LOG is set. Where nobody
configures anything, a handler on the logger `mpidist` writes INFO of rank 0 and WARNING
of all, with level, rank and host in each record.

Messages only inform, so they never raise, whatever becomes of them: stderr may be
closed, a broken pipe or a file on a full disk, and handlers of an application may
raise. An exception on one rank alone would leave the others waiting.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import socket
import sys
from typing import Any

from mpidist.util.settings import LOG

__all__ = [
    "RankHandler",
    "debug",
    "info",
    "rank_and_host",
    "report",
    "start",
    "warning",
    "write",
]

_ROOT = "mpidist"
# By whom a record was written to stderr already, as an attribute of it
_SHOWN_BY = "mpidist_shown_by"
_PYTHON, _REPORT = "warnings", "report"


def write(text: str) -> None:
    """Write text to stderr in one piece, if that is possible.

    In one piece, so that no other rank's output comes between.
    """
    # Not `print`: it writes to stdout where stderr was closed before Python started
    with contextlib.suppress(Exception):  # replaced streams may raise anything
        stream: Any = sys.stderr
        is_replaced = stream is not sys.__stderr__
        raw = getattr(getattr(stream, "buffer", None), "raw", None)
        if is_replaced or raw is None:
            stream.write(f"{text}\n")
            stream.flush()
            return
        # Past the buffer: on a full disk, Python would fail at its end to write what
        # is left there, and a job that went well would end with 120
        with contextlib.suppress(Exception):
            stream.flush()
        data = f"{text}\n".encode(stream.encoding, "backslashreplace")
        while data:
            data = data[raw.write(data) :]


class RankHandler(logging.Handler):
    """Writes records to what is stderr at the time, in one piece each.

    Args:
      rank: in COMM_WORLD.
      is_json: whether records are lines of JSON.
      is_asked: whether to write beside handlers of the application, too.
    """

    def __init__(self, rank: int, is_json: bool, is_asked: bool):
        super().__init__()
        self.is_json, self.is_asked = is_json, is_asked
        self.rank, self.host = rank, socket.gethostname()
        self.rank_and_host = f"rank {rank} {self.host}"
        self._is_writing = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; never raises.

        Python's warnings are shown by Python, but among lines of JSON they are records.
        """
        shown_by = getattr(record, _SHOWN_BY, "")
        if shown_by == _REPORT or (shown_by == _PYTHON and not self.is_json):
            return
        if not self.is_asked and has_other_handlers():
            return
        # A stream that logs what is written to it comes here again, in this thread
        if self._is_writing:
            return
        self._is_writing = True
        try:
            write(self.format(record))
        except Exception:  # of arguments that do not fit the message
            return
        finally:
            self._is_writing = False

    def format(self, record: logging.LogRecord) -> str:
        """Return the text, or the line of JSON, of a record."""
        text = super().format(record)
        if not self.is_json:
            return f"[{record.levelname} {self.rank_and_host}] {text}"
        when = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        fields = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "rank": self.rank,
            "host": self.host,
            "logger": record.name,
            "message": text,
        }
        return json.dumps(fields)


def start(rank: int) -> None:
    """Have the loggers write to stderr. `import mpidist` calls it; not collective.

    What cannot be read in MPIDIST_LOG is refused later, when all ranks can be told.

    Args:
      rank: in COMM_WORLD.
    """
    logger = logging.getLogger(_ROOT)
    level, is_json = LOG.read_or_default()
    default = logging.INFO if rank == 0 else logging.WARNING
    is_asked = LOG.text() is not None
    for former in [h for h in logger.handlers if isinstance(h, RankHandler)]:
        logger.removeHandler(former)
    handler = RankHandler(rank, is_json, is_asked)
    handler.setLevel(getattr(logging, level) if level else default)
    logger.addHandler(handler)
    if is_asked or logger.level == logging.NOTSET:
        logger.setLevel(handler.level)


def has_other_handlers() -> bool:
    """Return whether the application has a handler for the records."""
    ours, root = logging.getLogger(_ROOT), logging.getLogger()
    is_theirs = any(not isinstance(handler, RankHandler) for handler in ours.handlers)
    return is_theirs or (ours.propagate and bool(root.handlers))


def debug(room: str, text: str) -> None:
    """Log what is of use to somebody who looks for a mistake.

    Args:
      room: what the logger is named after, as "comm".
      text: the message.
    """
    _log(logging.DEBUG, room, text)


def info(room: str, text: str) -> None:
    """Log what users want to know of a job that goes well; see `debug`."""
    _log(logging.INFO, room, text)


def warning(room: str, text: str, *, is_shown: bool = False) -> None:
    """Log what users should know of; see `debug`.

    Args:
      room: see `debug`.
      text: the message.
      is_shown: whether it is one of Python's warnings, too, which Python shows.
    """
    _log(logging.WARNING, room, text, _PYTHON if is_shown else "")


def report(room: str, text: str) -> None:
    """Log why the job ends; see `debug`. It is written to stderr in any case.

    And there first: handlers of the application may wait for what hangs.
    """
    handler = _handler()
    name = f"{_ROOT}.{room}"
    record = logging.LogRecord(name, logging.ERROR, "", 0, text, None, None)
    write(text if handler is None else handler.format(record))
    _log(logging.ERROR, room, text, _REPORT)


def rank_and_host() -> str:
    """Return which rank this is, and on which host, as records say it."""
    handler = _handler()
    return socket.gethostname() if handler is None else handler.rank_and_host


def _handler() -> RankHandler | None:
    """Return the handler that `start` has made."""
    handlers = logging.getLogger(_ROOT).handlers
    return next((h for h in handlers if isinstance(h, RankHandler)), None)


def _log(level: int, room: str, text: str, shown_by: str = "") -> None:
    """Make a record, and let nothing out that handlers or filters raise."""
    with contextlib.suppress(Exception):
        handler, ours = _handler(), logging.getLogger(_ROOT)
        extra: dict[str, object] = {_SHOWN_BY: shown_by}
        if handler is not None:
            extra |= {"rank": handler.rank, "host": handler.host}
            # The application's level is to hold, not the one that `start` has set
            is_ours = not handler.is_asked and ours.level == handler.level
            if is_ours and has_other_handlers():
                ours.setLevel(logging.NOTSET)
        # Not as a format: the text may hold "%"
        logger = logging.getLogger(f"{_ROOT}.{room}")
        logger.log(level, "%s", text, stacklevel=3, extra=extra)
