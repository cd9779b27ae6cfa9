"""Timelines in a folder: the files of each rank, written and read.

A file is a JSON array of trace events, as Chrome and Perfetto read them, with one event
per line, whose end may be missing. It is compressed in independent blocks (gzip
members), so that the file of a killed job can be read. Times are microseconds since the
start of the timeline, on rank 0's clock as known at the start; "clock" events have what
the offset was later, by which readers correct the times. The status of a rank is its
statistics, in a JSON file that is replaced about once a second.
"""

from __future__ import annotations

import bisect
import gzip
import json
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.errors import DataError
from mpidist.util.files import open_regular, read_regular, replace_file
from mpidist.util.schemas import COUNT, INTEGER, SECONDS, SIGNED, Number, conform
from mpidist.util.settings import decimal

_LEVEL = 1  # of compression: half the time of level 2, a tenth more bytes
_PARTS = ("input", "communication", "waiting", "checkpoint")
_STEPS_THREAD = 0  # steps have their own row
_WAITED_NS = 50_000  # longer waits are events of their own
_GZIP = 16 + zlib.MAX_WBITS
_PIECE_BYTES = 1 << 20
_MOST_LINE_BYTES = 64 << 20  # of one event
# What may be wrong with a file
_DAMAGE = (OSError, ValueError, RecursionError)

_RANK = Number(0, 1 << 31)
_RANKS = Number(1, 1 << 31)
_POSITIVE = Number(1e-12, 1e11, is_integer=False)
_ABOUT = {"began": SECONDS, "job": str}
_CLOCK = {"offset_ns": INTEGER, "error_ns": COUNT}
_STEP = {
    "step": COUNT,
    "one_of": Number(1, COUNT.most),
    **dict.fromkeys(_PARTS, SIGNED),
}
# Of `Timeline`'s status: what the report uses of `Strategy.statistics`
_STATUS = {
    **_ABOUT,
    "rank": _RANK,
    "ranks": _RANKS,
    "state": str,
    "time": SECONDS,
    "one_of_steps": Number(1, COUNT.most),
    "script": str,
    "command": str,
    "host": str,
    "seconds": SECONDS,
    "steps": COUNT,
    "epochs": COUNT,
    "has_cache": bool,
    "first_step_seconds": SECONDS,
    "step_seconds": {"mean": SECONDS},
    "step_histogram": [(_POSITIVE, _POSITIVE, COUNT)],
    "measured_seconds": SECONDS,
    "parts": dict.fromkeys(
        ("compute", "communication", "input", "checkpoint"), SECONDS
    ),
    "waiting_seconds": SECONDS,
    "waiting_for": {str: SECONDS},
    "operations": {
        str: {
            "calls": COUNT,
            "seconds": SECONDS,
            "waiting_seconds": SECONDS,
            "bytes": {str: COUNT},
        }
    },
}


class ClockSample(NamedTuple):
    """The result of a clock comparison.

    Args:
      local_ns: the time of the comparison, on this rank's clock.
      offset_ns: this rank's clock minus rank 0's.
      error_ns: the maximum error of the offset.
    """

    local_ns: int
    offset_ns: int
    error_ns: int


def offset_at(samples: list[ClockSample], local_ns: float) -> float:
    """Return the offset at a time, by linear interpolation between samples."""
    after = bisect.bisect(samples, (local_ns, math.inf))
    if after == 0:
        return samples[0].offset_ns
    time, offset, _ = samples[after - 1]
    if after == len(samples):
        return offset + drift_ppm(samples) * 1e-6 * (local_ns - time)
    share = (local_ns - time) / (samples[after].local_ns - time)
    return offset + (samples[after].offset_ns - offset) * share


def drift_ppm(samples: list[ClockSample]) -> float:
    """Return the drift from rank 0's clock, in microseconds per second."""
    first, last = samples[0], samples[-1]
    took = last.local_ns - first.local_ns
    return 1e6 * (last.offset_ns - first.offset_ns) / took if took else 0.0


def error_ns(samples: list[ClockSample]) -> int:
    """Return the maximum error of the samples."""
    return max(sample.error_ns for sample in samples)


def trace_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank of COMM_WORLD."""
    return folder / f"timeline-{rank:05}.json.gz"


def status_path(folder: Path, rank: int) -> Path:
    """Return the file with the progress of a rank of COMM_WORLD."""
    return folder / f"status-{rank:05}.json"


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
        # By kind: COLLECTIVE, SPAN and STEP of `util.tracing`, which needs MPI
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
        if begun < self._origin_ns:
            return ""  # the timeline began within it
        shares = ",".join(
            [f'"{name}":{part / 1e3:.1f}' for name, part in zip(_PARTS, parts)]
        )
        return (
            self._head(_STEPS_THREAD, "step", begun, ended)
            + f'"step","args":{{"step":{number},"one_of":{stride},{shares}}}}},\n'
        )


class Step(NamedTuple):
    """A step of one rank; times are in seconds.

    Args:
      number: counted from 1.
      begun: start, since the start of the timeline, on rank 0's clock.
      seconds: its duration.
      one_of: the number of steps it represents.
      input, communication, waiting, checkpoint: its parts; waiting is a part of
        communication.
    """

    number: int
    begun: float
    seconds: float
    one_of: int
    input: float
    communication: float
    waiting: float
    checkpoint: float

    @property
    def compute(self) -> float:
        """The rest of the step."""
        parts = self.input + self.communication + self.checkpoint
        return max(0.0, self.seconds - parts)


class RankTrace(NamedTuple):
    """The timeline of one rank.

    Args:
      rank: in COMM_WORLD.
      about: description of the job, see `Timeline`.
      clock: comparisons with rank 0's clock, as offsets from the times in the file.
      end: information at the end; empty if the rank was killed.
      path: of the file.
    """

    rank: int
    about: Mapping[str, Any]
    clock: list[ClockSample]
    end: Mapping[str, Any]
    path: Path

    def events(self, *words: bytes) -> Iterator[dict[str, Any]]:
        """Yield all complete events, with times on rank 0's clock.

        Args:
          words: if there are any, events with none of them may be left out, as parsing
            takes most of the time.
        """
        for event in _events(self.path, *words):
            if "ts" in event and self.clock:
                begun = self._on_common_clock(event["ts"])
                if "dur" in event:
                    end = self._on_common_clock(event["ts"] + event["dur"])
                    event["dur"] = round(end - begun, 3)
                event["ts"] = begun
            yield event

    def _on_common_clock(self, us: float) -> float:
        return round(us - offset_at(self.clock, 1e3 * us) / 1e3, 3)

    def steps(self) -> list[Step]:
        """Return the recorded steps."""
        steps = []
        for event in self.events(b'"step"'):
            if event["ph"] == "X" and event.get("cat") == "step":
                args = _conform(self.path, event.get("args"), _STEP)
                parts = [args[name] / 1e6 for name in Step._fields[4:]]
                when, took = event["ts"] / 1e6, event["dur"] / 1e6
                steps.append(Step(args["step"], when, took, args["one_of"], *parts))
        return steps

    @property
    def clock_error_us(self) -> float:
        """The maximum error of the compared clocks."""
        return error_ns(self.clock) / 1e3 if self.clock else 0.0

    @property
    def drift_ppm(self) -> float:
        """See `drift_ppm`."""
        return drift_ppm(self.clock) if self.clock else 0.0


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the timelines of the last job that wrote into a folder, by rank.

    Raises:
      DataError: the folder has no timeline, or it cannot be read.
    """
    traces = []
    for path in sorted(folder.glob("timeline-*.json.gz")):
        trace = _read_trace(path)
        if trace is not None:
            traces.append(trace)
    if not traces:
        raise DataError(
            f"{folder} has no timeline; run the job with MPIDIST_TIMELINE={folder}"
        )
    last = max(traces, key=lambda trace: trace.about["began"]).about["job"]
    return [trace for trace in traces if trace.about["job"] == last]


def _read_trace(path: Path) -> RankTrace | None:
    about: dict[str, Any] = {}
    end: dict[str, Any] = {}
    clock, rank = [], -1
    for event in _events(path, b'"M"', b'"clock"'):
        args = event.get("args")
        if event["ph"] == "M":
            rank = event["pid"]
            if event["name"] == "mpidist":
                about = _conform(path, args, _ABOUT)
            elif event["name"] == "mpidist_end":
                end = _conform(path, args, {"one_of_steps": COUNT, "dropped": COUNT})
        elif event["name"] == "clock" and "ts" in event:
            sample = _conform(path, args, _CLOCK)
            when = round(1e3 * event["ts"])
            clock.append(ClockSample(when, sample["offset_ns"], sample["error_ns"]))
    return RankTrace(rank, about, sorted(clock), end, path) if about else None


def _conform(path: Path, value: Any, schema: Any) -> Any:
    try:
        return conform(value, schema)
    except ValueError as error:
        raise _not_a_timeline(path, error) from None


def _not_a_timeline(path: Path, error: object) -> DataError:
    return DataError(f"{path} is not a timeline: {error}")


def _events(path: Path, *words: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, whose end may be missing; see `RankTrace.events`."""
    try:
        for line in _lines(path):
            text = line.strip().rstrip(b",")
            if text in (b"", b"[", b"]"):
                continue
            if words and not any(word in text for word in words):
                continue
            try:
                event = json.loads(text)
            except (ValueError, RecursionError):  # cut off
                return
            if not _is_event(event):
                raise _not_a_timeline(path, "a line is no event")
            yield event
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _is_event(event: Any) -> bool:
    """Return whether this is an event; a trace has too many of them for `conform`."""
    if type(event) is not dict or type(event.get("pid")) is not int:
        return False
    if type(event.get("ph")) is not str or type(event.get("name")) is not str:
        return False
    times = [event[key] for key in ("ts", "dur") if key in event]
    return all(
        type(time) in (int, float) and abs(time) <= SIGNED.most for time in times
    ) and (len(times) == 2 or event["ph"] != "X")


def _lines(path: Path) -> Iterator[bytes]:
    rest = b""
    with open(open_regular(path), "rb") as file:
        inflate = zlib.decompressobj(_GZIP)
        data = file.read(_PIECE_BYTES)
        while data and len(rest) < _MOST_LINE_BYTES:
            try:
                text = rest + inflate.decompress(data, _PIECE_BYTES)
            except zlib.error:
                break
            *lines, rest = text.split(b"\n")
            yield from lines
            data = inflate.unconsumed_tail
            if inflate.eof:
                data = inflate.unused_data
                inflate = zlib.decompressobj(_GZIP)
            data = data or file.read(_PIECE_BYTES)
    yield rest


def read_statuses(folder: Path) -> list[dict[str, Any]]:
    """Return the progress of each rank of the last job; empty if there is none.

    Raises:
      DataError: a file with the name of one is damaged, or of something else.
    """
    read = map(_read_status, sorted(folder.glob("status-*.json")))
    statuses = [status for status in read if status is not None]
    if not statuses:
        return []
    job = max(statuses, key=lambda one: one["began"])["job"]
    by_rank = {one["rank"]: one for one in statuses if one["job"] == job}
    if len(by_rank) < sum(one["job"] == job for one in statuses):
        raise DataError(f"{folder} has two statuses of one rank")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _read_status(path: Path) -> dict[str, Any] | None:
    """Return the content of a file; None if it has gone, or is not of a timeline."""
    try:
        content = json.loads(read_regular(path))
        if type(content) is not dict or not {"began", "job", "rank"} <= content.keys():
            return None
        # A status of an earlier version does not say what ran
        content = {"script": "", "command": "", **content}
        status: dict[str, Any] = conform(content, _STATUS)
        for rank in [str(status["rank"]), *status["waiting_for"]]:
            if (number := decimal(rank)) is None or number >= status["ranks"]:
                raise ValueError(f"there is no rank {rank}")
    except FileNotFoundError:
        return None
    except _DAMAGE as error:
        raise DataError(f"{path} is not the status of a rank: {error}") from None
    return status


def merge(folder: Path, output: Path) -> int:
    """Write the events of all ranks into one file; return their number.

    The file is a JSON object for Perfetto and Chrome, with all times on rank 0's clock;
    compressed if its name ends in ".gz".

    Raises:
      DataError: see `read_traces`.
      OSError: it cannot be written.
    """
    traces = read_traces(folder)
    about = {
        "clock_error_us": {str(t.rank): t.clock_error_us for t in traces},
        "clock_drift_ppm": {str(t.rank): t.drift_ppm for t in traces},
    }
    count = 0
    with replace_file(output) as raw:
        is_small = output.suffix == ".gz"
        file: Any = gzip.GzipFile("", "wb", 6, raw, 0) if is_small else raw
        file.write(b'{"displayTimeUnit":"ms","otherData":')
        file.write(json.dumps(about).encode() + b',"traceEvents":[\n')
        for trace in traces:
            for event in trace.events():
                file.write((b",\n" if count else b"") + json.dumps(event).encode())
                count += 1
        file.write(b"\n]}\n")
        if is_small:
            file.close()
    return count
