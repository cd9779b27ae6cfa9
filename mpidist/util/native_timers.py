"""Text that the C library writes to stderr later, also after the end of Python.

MPI_Finalize runs when there is no Python any more, and may wait for ever. So the text
is written by a thread of a timer of POSIX, which calls a function of the C library.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from typing import Any

_BY_THREAD = 2  # SIGEV_THREAD of Linux


class _Event(ctypes.Structure):
    """`struct sigevent` of Linux, in which a thread calls a function."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("kind", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class NativeTimer:
    """A timer of POSIX.

    Args:
      number: of the system; None if there is none.
    """

    def __init__(self, number: ctypes.c_void_p | None):
        self._number = number

    def cancel(self) -> None:
        """Write nothing; a second call does nothing."""
        number, self._number = self._number, None
        if number is not None:
            _function("timer_delete")(number)


def say_later(text: str, seconds: float) -> NativeTimer:
    """Write a line to stderr after some time, unless the timer is cancelled before.

    The C library puts the program's name before it. Nothing is written where there are
    no such timers (not on Linux).
    """
    with contextlib.suppress(AttributeError, OSError):
        copied = ctypes.CDLL(None).strdup
        copied.restype = ctypes.c_void_p  # of memory that outlives Python
        line = copied(text.replace("%", "%%").encode(errors="backslashreplace"))
        warn = ctypes.cast(ctypes.CDLL(None).warnx, ctypes.c_void_p)
        event = _Event(line, 0, _BY_THREAD, warn, None)
        number = ctypes.c_void_p()
        create, start = _function("timer_create"), _function("timer_settime")
        if create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(number)):
            return NativeTimer(None)
        whole, rest = divmod(seconds, 1)
        # No interval, and the time
        when = (ctypes.c_long * 4)(0, 0, int(whole), int(rest * 1e9))
        start(number, 0, ctypes.byref(when), None)
        return NativeTimer(number)
    return NativeTimer(None)


def _function(name: str) -> Any:
    """Return a function of timers: before version 2.34, they are not in glibc itself.

    Raises:
      AttributeError, OSError: there is none.
    """
    if hasattr(ctypes.CDLL(None), name):
        return getattr(ctypes.CDLL(None), name)
    return getattr(ctypes.CDLL("librt.so.1"), name)
