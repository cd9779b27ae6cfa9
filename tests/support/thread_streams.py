"""A device made of threads: streams that do their work in order, after they were told.

It keeps the contract of `CopyStream`, and makes the worst of it: memory that nobody
holds is given away at once, whatever streams still do with it, and a late stream does
nothing before somebody waits for it.
"""

import collections
import threading
import weakref

import numpy as np


class Event:
    """A point in a stream."""

    def __init__(self, stream, number):
        self._stream = stream
        self._number = number

    def synchronize(self):
        self._stream.wait_until(self._number)


class Stream:
    """A thread that does one piece of work after the other."""

    def __init__(self, late):
        self._work = collections.deque()
        self._changed = threading.Condition()
        self._added = self._done = 0
        self._wanted = 0 if late else float("inf")
        self._error = None
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def is_idle(self):
        return self._done == self._added

    def do(self, piece, *arguments):
        with self._changed:
            self._work.append((piece, arguments))
            self._added += 1
            self._changed.notify_all()

    def wait(self, event):
        self.do(event.synchronize)

    def record(self):
        return Event(self, self._added)

    def synchronize(self):
        self.record().synchronize()

    def wait_until(self, number):
        with self._changed:
            self._wanted = max(self._wanted, number)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._done >= number, 600), "it hangs"
            if self._error is not None:
                raise self._error

    def end(self):
        self.synchronize()
        self.do(None)
        self.synchronize()

    def _run(self):
        piece = len
        while piece is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._work and self._wanted > self._done)
                piece, arguments = self._work.popleft()
            try:
                if piece is not None:
                    piece(*arguments)
            except BaseException as error:
                self._error = error
            del arguments
            with self._changed:
                self._done += 1
                self._changed.notify_all()


class Memory:
    """Bytes of a pool, which get back there when nobody in Python holds them."""

    def __init__(self, block):
        self.__array_interface__ = block.__array_interface__


class Pool:
    """Memory that is used again at once.

    Args:
      limit: how many bytes it may have at most.
    """

    def __init__(self, limit=float("inf")):
        self.limit = limit
        self.blocks = []
        self.free = []

    @property
    def size(self):
        return sum(block.size for block in self.blocks)

    @property
    def is_all_free(self):
        return len(self.free) == len(self.blocks)

    def allocate(self, size):
        fitting = [i for i, block in enumerate(self.free) if block.size >= size]
        if fitting:
            block = self.free.pop(fitting[-1])
        elif self.size + size > self.limit:
            raise MemoryError(f"no {size} bytes")
        else:
            block = np.full(size, 0xDB, np.uint8)
            self.blocks.append(block)
        memory = Memory(block)
        weakref.finalize(memory, self.free.append, block)
        return np.asarray(memory)

    def bytes_of(self, array):
        """The bytes at an address: they do not keep the memory, as no pointer does."""
        start = array.ctypes.data
        for block in self.blocks:
            first = start - block.ctypes.data
            if first >= 0 and first + array.nbytes <= block.size:
                return block[first : first + array.nbytes]
        raise AssertionError("it is not in this pool")


class DeviceArray(np.ndarray):
    """What is on the device; to be read after `ThreadCopyStream.here` only."""


class ThreadCopyStream:
    """A stream of copies to memory that is called a device.

    Args:
      late: whether copies are done when somebody waits for them, and no sooner.
      late_here: so for the stream that is current in all threads, `here`.

    `sent` has the sizes of what was sent.
    """

    def __init__(self, late=False, late_here=False):
        self.copies = Stream(late)
        self.here = Stream(late_here)
        self.host = Pool()
        self.device = Pool()
        self.sent = []

    def pin(self, size):
        return self.host.allocate(size)

    def reserve(self, size):
        return self.device.allocate(size)

    def holds(self, leaf):
        return isinstance(leaf, DeviceArray)

    def send(self, host, staged, start):
        place = self.device.bytes_of(staged)[start : start + host.size]
        self.sent.append(host.size)
        self.copies.do(np.copyto, place, self.host.bytes_of(host))

    def send_array(self, array, staged, part):
        self.copies.wait(self.here.record())
        self.copies.do(np.copyto, self._array(staged, part), array)
        self.here.wait(self.copies.record())

    def wait(self, event):
        self.copies.wait(event)

    def record(self):
        return self.copies.record()

    def fetch(self, staged, parts, sent):
        self.here.wait(sent)
        fetched = []
        for part in parts:
            array = np.full(part.shape, 1, part.dtype)
            self.here.do(np.copyto, array, self._array(staged, part))
            fetched.append(array.view(DeviceArray))
        return fetched, self.here.record()

    def end(self):
        self.here.end()
        self.copies.end()

    def _array(self, staged, part):
        part_bytes = self.device.bytes_of(staged)[part.start : part.start + part.nbytes]
        return part_bytes.view(part.dtype).reshape(part.shape)
