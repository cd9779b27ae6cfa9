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
from mpidist.util.files import replace_file

__all__ = ["RankTrace", "Step", "merge", "read_statuses", "read_traces"]

_GZIP = 16 + zlib.MAX_WBITS


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
                args = event["args"]
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
    paths = folder.glob("timeline-*.json.gz")
    for path in sorted(path for path in paths if path.is_file()):
        try:
            trace = _read_trace(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a timeline: {error!r}") from None
        if trace is not None:
            found.append(trace)
    if not found:
        raise DataError(
            f"{folder} has no timeline; run the job with MPIDIST_TIMELINE={folder}"
        )
    last = max(found, key=lambda trace: float(trace.about["began"])).about["job"]
    return [trace for trace in found if trace.about["job"] == last]


def _read_trace(path: Path) -> RankTrace | None:
    about: dict[str, Any] = {}
    end: dict[str, Any] = {}
    clock, rank = [], -1
    for event in _events(path, b'"M"', b'"clock"'):
        if event["ph"] == "M":
            rank = event["pid"]
            if event["name"] == "mpidist":
                about = event["args"]
            elif event["name"] == "mpidist_end":
                end = event["args"]
        elif event["name"] == "clock":
            args = event["args"]
            sample = round(1e3 * event["ts"]), args["offset_ns"], args["error_ns"]
            clock.append(ClockSample(*sample))
    return RankTrace(rank, about, clock, end, path) if about else None


def _events(path: Path, *words: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a file, whose end may be missing.

    Args:
      path: the file.
      words: if there are any, events with none of them may be left out, as parsing
        takes most of the time.
    """
    for line in _lines(path):
        text = line.strip().rstrip(b",")
        if text in (b"", b"[", b"]"):
            continue
        if words and not any(word in text for word in words):
            continue
        try:
            yield json.loads(text)
        except ValueError:  # cut off
            return


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of compressed blocks, as far as they can be read."""
    rest = b""
    with path.open("rb") as file:
        inflate = zlib.decompressobj(_GZIP)
        data = file.read(1 << 20)
        while data:
            try:
                text = rest + inflate.decompress(data)
            except zlib.error:
                break
            *lines, rest = text.split(b"\n")
            yield from lines
            data = inflate.unused_data
            if inflate.eof:
                inflate = zlib.decompressobj(_GZIP)
            data = data or file.read(1 << 20)
    yield rest


def read_statuses(folder: Path) -> list[dict[str, Any]]:
    """Return the progress of each rank of the last job; empty if there is none."""
    found = []
    for path in sorted(folder.glob("status-*.json")):
        try:
            status = json.loads(path.read_text())
        except (OSError, ValueError):  # perhaps it is being replaced
            continue
        if isinstance(status, dict) and {"began", "job", "rank"} <= status.keys():
            found.append(status)
    if not found:
        return []
    job = max(found, key=lambda one: float(one["began"]))["job"]
    return sorted(
        (one for one in found if one["job"] == job), key=lambda one: int(one["rank"])
    )


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
