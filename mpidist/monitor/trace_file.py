"""The file of one rank's timeline: trace events as Chrome and Perfetto read them.

It is a JSON array with one event per line, whose end may be missing. It is compressed
in independent blocks (gzip members), so the file of a killed job can be read. Times are
microseconds since the start of the timeline, on rank 0's clock as known at that moment;
see `monitor.trace_reader`.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpidist.util.tracing import COLLECTIVE, STEP

__all__ = ["TraceFile", "trace_path"]

_LEVEL = 1  # of compression: half the time of level 2, a tenth more bytes
_PARTS = ("input", "communication", "waiting", "checkpoint")
_STEPS_THREAD = 0  # steps have their own row
_WAITED_NS = 50_000  # longer waits are events of their own


def trace_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank of COMM_WORLD."""
    return folder / f"timeline-{rank:05}.json.gz"


class TraceFile:
    """Writes one file. One thread at a time uses it.

    Args:
      path: of the file; an existing file or link is replaced.
      rank: in COMM_WORLD, the "process" of all events.
      host: the name of the node.
      origin_ns: time 0 of the file, on this rank's clock.
      about: description of the job, as JSON.

    Raises:
      OSError: the file cannot be written.
    """

    def __init__(self, path: Path, rank: int, host: str, origin_ns: int, about: Any):
        self._rank, self._origin_ns, self._path = rank, origin_ns, path
        self._names: dict[str, str] = {}
        self._threads: dict[int, int] = {}
        self._formats: list[Callable[[Sequence[Any]], str]] = [
            self._collective,
            self._span,
            self._step,
        ]
        # A file of its own, as an earlier job may still write into that one
        path.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o666)
        self.size_bytes = 0
        name = {"name": f"rank {rank} on {host}"}
        lines = [
            self.metadata("process_name", name),
            self.metadata("process_sort_index", {"sort_index": rank}),
            self.metadata("thread_name", {"name": "steps"}),
            self.metadata("mpidist", about),
        ]
        self._write("[\n" + "".join(lines))

    def metadata(self, name: str, args: Any, thread: int = _STEPS_THREAD) -> str:
        """Return a line with metadata of the process or a thread."""
        event = {"ph": "M", "pid": self._rank, "tid": thread, "name": name}
        return json.dumps(event | {"args": args}) + ",\n"

    def instant(self, name: str, when_ns: int, args: Any) -> str:
        """Return a line for an event without duration."""
        event = {"ph": "i", "s": "p", "pid": self._rank, "tid": _STEPS_THREAD}
        when = (when_ns - self._origin_ns) / 1e3
        return json.dumps(event | {"name": name, "ts": when, "args": args}) + ",\n"

    def append(self, events: Sequence[Sequence[Any]], more: Sequence[str] = ()) -> None:
        """Append a block: events of a `TraceBuffer`, and lines.

        Raises:
          OSError: it cannot be written; the file then ends before the block.
        """
        named, formats = self._name_threads(events), self._formats
        lines = [formats[event[0]](event) for event in events]
        if lines or more:
            self._write("".join([*named, *lines, *more]))

    def require_own(self) -> None:
        """Raise an error if another job has replaced the file.

        Raises:
          OSError: it has, or the file was removed.
        """
        if not os.path.samestat(self._path.stat(), os.fstat(self._file)):
            raise OSError("another job writes into this folder now")

    def close(self, last: str = "") -> None:
        """End the array with a last line, and close the file.

        Raises:
          OSError: the end cannot be written; readers do not need it.
        """
        try:
            self._write(last.removesuffix(",\n") + "\n]\n")
        finally:
            os.close(self._file)

    def _write(self, text: str) -> None:
        block = memoryview(gzip.compress(text.encode(), _LEVEL, mtime=0))
        done = 0
        try:
            while done < len(block):
                done += os.write(self._file, block[done:])
        except OSError:
            os.ftruncate(self._file, self.size_bytes)
            raise
        self.size_bytes += len(block)

    def _name_threads(self, events: Sequence[Sequence[Any]]) -> list[str]:
        new = {event[1] for event in events} - self._threads.keys()
        if not new:
            return []
        names = {t.ident: t.name for t in threading.enumerate()}
        lines = []
        for ident in sorted(new):
            number = self._threads[ident] = len(self._threads) + 1
            name = names.get(ident, "a thread that has ended")
            lines.append(self.metadata("thread_name", {"name": name}, number))
        return lines

    def _quoted(self, name: str) -> str:
        found = self._names.get(name)
        if found is None:
            if len(self._names) > 10_000:  # perhaps each step has its own name
                self._names.clear()
            found = self._names[name] = json.dumps(name)
        return found

    def _head(self, thread: int, name: str, begun: int, ended: int) -> str:
        return (
            '{"ph":"X","pid":%d,"tid":%d,"name":%s,"ts":%.3f,"dur":%.3f,"cat":'  # noqa: UP031 - half of the time
            % (
                self._rank,
                thread,
                self._quoted(name),
                (begun - self._origin_ns) / 1e3,
                (ended - begun) / 1e3,
            )
        )

    def _collective(self, event: Sequence[Any]) -> str:
        _, ident, name, begun, ended, waiting, late, moved, transport = event
        assert event[0] == COLLECTIVE
        thread = self._threads[ident]
        text = (
            self._head(thread, name, begun, ended)
            + '"collective","args":{"wait_us":%.3f,"late":%d,"bytes":%d,"by":"%s"}},\n'  # noqa: UP031
            % (waiting / 1e3, late, moved, transport)
        )
        if waiting < _WAITED_NS:
            return text
        name = f"wait for rank {late}" if late >= 0 else "wait"
        return (
            text
            + self._head(thread, name, begun, min(begun + waiting, ended))
            + '"wait"},\n'
        )

    def _span(self, event: Sequence[Any]) -> str:
        _, ident, name, begun, ended, category = event
        thread = self._threads[ident]
        return self._head(thread, name, begun, ended) + f'"{category}"}},\n'

    def _step(self, event: Sequence[Any]) -> str:
        _, _, number, begun, ended, stride, *parts = event
        assert event[0] == STEP
        if begun < self._origin_ns:
            return ""  # the timeline began within it
        shares = ",".join(
            [f'"{name}":{part / 1e3:.1f}' for name, part in zip(_PARTS, parts)]
        )
        return (
            self._head(_STEPS_THREAD, "step", begun, ended)
            + f'"step","args":{{"step":{number},"one_of":{stride},{shares}}}}},\n'
        )
