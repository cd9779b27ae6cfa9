"""An exception at any line of the library, as a signal handler raises it."""

import contextlib
import dis
import os
import sys

import mpidist

_NOP = dis.opmap["NOP"]
FOLDER = os.path.dirname(mpidist.__file__) + os.sep


class Interrupt(Exception):
    """What a signal handler raises."""


@contextlib.contextmanager
def interrupted(number, kind=Interrupt, folder=FOLDER, is_counted=lambda: True):
    """Raise at this line of mpidist, counted where `is_counted()`.

    Only lines of public collectives count: what is between them is the user's own code.
    """
    left, open_calls = [number], []

    def at_line(frame, event, argument):
        # At a `try:`, for which no handler is looked up, no signal handler runs
        is_nop = frame.f_code.co_code[frame.f_lasti] == _NOP
        if event == "line" and open_calls and not is_nop and is_counted():
            left[0] -= 1
        if left[0] == 0:
            sys.settrace(None)
            raise kind(f"at {frame.f_code.co_name}")
        return at_line

    def at_end(frame, event, argument):
        if event == "return":
            open_calls.remove(frame)
        return at_end

    def at_call(frame, event, argument):
        path = frame.f_code.co_filename
        if path.endswith("text in public_calls.py"):
            open_calls.append(frame)
            return at_end
        is_inside = path.startswith(folder) and not path.endswith("public_calls.py")
        return at_line if is_inside else None

    former = sys.gettrace()
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(former)
