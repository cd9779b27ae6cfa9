"""Read the folder of a timeline, of a running, ended or killed job."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.errors import DataError
from mpidist.monitor.clock_samples import ClockSample, drift_ppm, error_ns, offset_at
from mpidist.util.files import open_regular, read_regular, replace_file
from mpidist.util.schemas import COUNT, INTEGER, SECONDS, SIGNED, Number, conform
from mpidist.util.settings import decimal

__all__ = ["RankTrace", "Step", "merge", "read_statuses", "read_traces"]

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
    **dict.fromkeys(("input", "communication", "waiting", "checkpoint"), SIGNED),
}
# Of `Timeline`'s status: what the report uses of `Strategy.statistics`
_STATUS = {
    **_ABOUT,
    "rank": _RANK,
    "ranks": _RANKS,
    "state": str,
    "time": SECONDS,
    "one_of_steps": Number(1, COUNT.most),
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

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all complete events, with times on rank 0's clock."""
        return self._events()

    def _events(self, *words: bytes) -> Iterator[dict[str, Any]]:
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
        found = []
        for event in self._events(b'"step"'):
            if event.get("cat") == "step":
                args = _conform(self.path, event.get("args"), _STEP)
                parts = [args[name] / 1e6 for name in Step._fields[4:]]
                when, took = event["ts"] / 1e6, event["dur"] / 1e6
                found.append(Step(args["step"], when, took, args["one_of"], *parts))
        return found

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
    found = []
    for path in sorted(folder.glob("timeline-*.json.gz")):
        trace = _read_trace(path)
        if trace is not None:
            found.append(trace)
    if not found:
        raise DataError(
            f"{folder} has no timeline; run the job with MPIDIST_TIMELINE={folder}"
        )
    last = max(found, key=lambda trace: trace.about["began"]).about["job"]
    return [trace for trace in found if trace.about["job"] == last]


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
            found = _conform(path, args, _CLOCK)
            when = round(1e3 * event["ts"])
            clock.append(ClockSample(when, found["offset_ns"], found["error_ns"]))
    return RankTrace(rank, about, sorted(clock), end, path) if about else None


def _conform(path: Path, value: Any, schema: Any) -> Any:
    try:
        return conform(value, schema)
    except ValueError as error:
        raise _not_a_timeline(path, error) from None


def _not_a_timeline(path: Path, error: object) -> DataError:
    return DataError(f"{path} is not a timeline: {error}")


def _events(path: Path, *words: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, whose end may be missing.

    Args:
      path: the file.
      words: if there are any, events with none of them may be left out, as parsing
        takes most of the time.
    """
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
    """Yield the lines of compressed blocks, as far as they can be read."""
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
    found = [status for status in read if status is not None]
    if not found:
        return []
    job = max(found, key=lambda one: one["began"])["job"]
    by_rank = {one["rank"]: one for one in found if one["job"] == job}
    if len(by_rank) < sum(one["job"] == job for one in found):
        raise DataError(f"{folder} has two statuses of one rank")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _read_status(path: Path) -> dict[str, Any] | None:
    """Return the content of a file; None if it has gone, or is not of a timeline."""
    try:
        found = json.loads(read_regular(path))
        if type(found) is not dict or not {"began", "job", "rank"} <= found.keys():
            return None
        status: dict[str, Any] = conform(found, _STATUS)
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
