"""The frames of other threads."""

import gc
import threading

from mpidist.util.cpython import ThreadFrames


class _Ender:
    """Garbage that ends a thread when it is collected."""

    def __init__(self, end):
        self.end, self.cycle = end, self

    def __del__(self):
        self.end()


def test_no_destructor_runs_while_frames_are_read():
    """The thread would end within `f_back`, which then returned a frame of nothing."""
    arrived, leave = threading.Event(), threading.Event()

    def outer():
        inner()

    def inner():
        arrived.set()
        leave.wait()

    thread = threading.Thread(target=outer)
    thread.start()
    arrived.wait()
    thresholds = gc.get_threshold()
    names = []
    try:
        with ThreadFrames() as frames:
            gc.set_threshold(1)
            _Ender(lambda: (leave.set(), thread.join()))
            frame = frames[thread.ident]
            while frame is not None:
                names.append(frame.f_code.co_name)
                frame = frame.f_back
            assert not leave.is_set()
    finally:
        gc.set_threshold(*thresholds)
        leave.set()
        thread.join()
    assert names[-4:] == ["outer", "run", "_bootstrap_inner", "_bootstrap"]
    assert "inner" in names
    assert gc.isenabled()


def test_frames_of_this_thread_have_its_callers():
    with ThreadFrames() as frames:
        frame, names = frames[threading.get_ident()], []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
    assert "test_frames_of_this_thread_have_its_callers" in names
    assert not frames
