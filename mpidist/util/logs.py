"""The loggers `mpidist.*`, and the handler that writes their records to stderr.

If the application configures `logging`, its levels, handlers and formats apply to all
records, and nothing else is written unless MPIDIST_LOG is set. Otherwise a handler of
the logger `mpidist` writes INFO of rank 0 and WARNING of all ranks, with level, rank
and host in each record.

Logging never raises: an exception on one rank alone would leave the others waiting.
stderr may be closed, a broken pipe or a file on a full disk, and handlers of the
application may raise.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import socket
import sys
import warnings
from typing import Any

from mpidist.util.settings import LOG

_ROOT = "mpidist"
# The attribute of a record that says who has written it to stderr already
_SHOWN_BY = "mpidist_shown_by"
_PYTHON, _REPORT = "warnings", "report"


def write(text: str) -> None:
    """Write text to stderr in one piece if possible, and never raise.

    In one piece, so that it is not interleaved with other ranks' output.
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
        # Bypass the buffer: on a full disk Python would fail to flush it at exit, and a
        # successful job would end with status 120
        with contextlib.suppress(Exception):
            stream.flush()
        data = f"{text}\n".encode(stream.encoding, "backslashreplace")
        while data:
            data = data[raw.write(data) :]


class _OurLevel(int):
    """A level that `start` has set: it is told from the same one of the program."""


class RankHandler(logging.Handler):
    """Writes each record to the current stderr in one piece.

    Args:
      rank: in COMM_WORLD.
      is_json: whether records are lines of JSON.
      is_asked: whether to write even if the application has handlers of its own.
    """

    def __init__(self, rank: int, is_json: bool, is_asked: bool):
        super().__init__()
        self.is_json, self.is_asked = is_json, is_asked
        self.rank, self.host = rank, socket.gethostname()
        self.rank_and_host = f"rank {rank} {self.host}"
        self._is_writing = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; never raises.

        Records of Python's warnings are written only as JSON: Python has shown them.
        """
        shown_by = getattr(record, _SHOWN_BY, "")
        if shown_by == _REPORT or (shown_by == _PYTHON and not self.is_json):
            return
        if not self.is_asked and has_other_handlers():
            return
        # A stream that logs what is written to it calls this again, in this thread
        if self._is_writing:
            return
        self._is_writing = True
        try:
            write(self.format(record))
        except Exception:  # the record's arguments do not fit its message
            return
        finally:
            self._is_writing = False

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line of text, or of JSON."""
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
    """Install the handler. `import mpidist` calls it; not collective.

    An invalid MPIDIST_LOG is an error later, where it can be raised on all ranks.

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
        logger.setLevel(_OurLevel(handler.level))


def has_other_handlers() -> bool:
    """Return whether the application has a handler for these records."""
    ours, root = logging.getLogger(_ROOT), logging.getLogger()
    is_theirs = any(not isinstance(handler, RankHandler) for handler in ours.handlers)
    return is_theirs or (ours.propagate and bool(root.handlers))


def debug(room: str, text: str) -> None:
    """Log a message for debugging.

    Args:
      room: the last part of the logger's name, such as "comm".
      text: the message.
    """
    _log(logging.DEBUG, room, text)


def info(room: str, text: str) -> None:
    """Log normal progress; see `debug` for the arguments."""
    _log(logging.INFO, room, text)


def warning(room: str, text: str, *, is_shown: bool = False) -> None:
    """Log a warning.

    Args:
      room: see `debug`.
      text: the message.
      is_shown: whether Python shows it as a warning, too.
    """
    _log(logging.WARNING, room, text, _PYTHON if is_shown else "")


def report(room: str, text: str) -> None:
    """Log why the job ends; see `debug` for the arguments.

    It is always written to stderr, and there first: handlers of the application may
    hang.
    """
    write(formatted(text, room))
    _log(logging.ERROR, room, text, _REPORT)


def formatted(text: str, room: str = "resilience") -> str:
    """Return a message as `report` writes it."""
    handler = _handler()
    name = f"{_ROOT}.{room}"
    record = logging.LogRecord(name, logging.ERROR, "", 0, text, None, None)
    return text if handler is None else handler.format(record)


def rank_and_host() -> str:
    """Return this process's rank and host, as in records: "rank 0 node7"."""
    handler = _handler()
    return socket.gethostname() if handler is None else handler.rank_and_host


def _handler() -> RankHandler | None:
    handlers = logging.getLogger(_ROOT).handlers
    return next((h for h in handlers if isinstance(h, RankHandler)), None)


def _log(level: int, room: str, text: str, shown_by: str = "") -> None:
    """Log a record; suppress the errors of handlers and filters."""
    with contextlib.suppress(Exception):
        handler, ours = _handler(), logging.getLogger(_ROOT)
        extra: dict[str, object] = {_SHOWN_BY: shown_by}
        if handler is not None:
            extra |= {"rank": handler.rank, "host": handler.host}
            # The application's level applies, not the one that `start` has set
            is_ours = not handler.is_asked and isinstance(ours.level, _OurLevel)
            if is_ours and has_other_handlers():
                ours.setLevel(logging.NOTSET)
        # Not as a format string: the text may contain "%"
        logger = logging.getLogger(f"{_ROOT}.{room}")
        logger.log(level, "%s", text, stacklevel=3, extra=extra)


def warn(text: str, stacklevel: int = 1) -> None:
    """Issue a RuntimeWarning and log it; if it would raise, only log it.

    `python -W error` makes exceptions of them, and one on one rank alone would leave
    the others waiting.

    Python shows it on stderr once per line of code, with rank and host at its end;
    handlers of the application, and JSON lines, get it as a record.

    Args:
      text: the message.
      stacklevel: as in `warnings.warn`: 1 is the caller of this function.
    """
    try:
        shown = f"{text} [{rank_and_host()}]"
        warnings.warn(shown, RuntimeWarning, stacklevel=stacklevel + 1)
    except Exception:  # -W error, or the program's own `warnings.showwarning`
        warning("warnings", f"RuntimeWarning: {text}")
    else:
        warning("warnings", text, is_shown=True)
