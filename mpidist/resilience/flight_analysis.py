"""`python -m mpidist diff`: compares the flight recorders of all ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpidist.comm.consensus.flight_files import (
    BEGUN,
    ENDED,
    FORMAT,
    KIND,
    NUMBER,
    STEP,
    WORDS,
)
from mpidist.comm.consensus.signatures import group_by_rank, name_ranks
from mpidist.errors import DataError
from mpidist.util.files import read_regular
from mpidist.util.schemas import COUNT, INTEGER, SECONDS, Number, conform

_SUFFIX = ".jsonl"
_HEADER = {
    "job": INTEGER,
    "channel": COUNT,
    "rank": COUNT,
    "members": [COUNT],
    "time": SECONDS,
    "monotonic_ns": INTEGER,
}
_KIND = {
    "kind": COUNT,
    "operation": str,
    "site": str,
    "agreed": {str: str},
    "digest": Number(-(1 << 64), 1 << 64),
}


class Recorded(NamedTuple):
    """One recorded call.

    Args:
      kind: the number of its kind.
      begun: start, in seconds on time.time's clock.
      ended: end, likewise; 0 if it did not end.
      step: the step of a loop; -1 without one.
    """

    kind: int
    begun: float
    ended: float
    step: int


@dataclasses.dataclass(frozen=True)
class Flight:
    """The calls of one rank on one communicator.

    Args:
      job: the number of the job.
      time: when the rank made the communicator, on time.time's clock.
      channel: the number of the communicator.
      rank: the rank in that communicator.
      members: the ranks in COMM_WORLD of all members.
      kinds: the kinds of calls by number: mappings with `operation`, `site`, `agreed`
        (perhaps truncated) and `digest`.
      calls: the recorded calls by number.
    """

    job: int
    time: float
    channel: int
    rank: int
    members: tuple[int, ...]
    kinds: Mapping[int, Mapping[str, Any]]
    calls: Mapping[int, Recorded]

    def text(self, number: int) -> str:
        """Return a call and its compared arguments."""
        call = self.calls[number]
        kind = self.kinds[call.kind]
        agreed = kind["agreed"] | ({"step": call.step} if call.step >= 0 else {})
        text = ", ".join(f"{name} {what}" for name, what in agreed.items())
        return f"{kind['operation']}({text}) at {kind['site']}"

    def key(self, number: int) -> tuple[Any, ...]:
        """Return what must be the same on all ranks."""
        call = self.calls[number]
        kind = self.kinds[call.kind]
        agreed = json.dumps(kind["agreed"], sort_keys=True)
        return kind["operation"], agreed, kind["digest"], call.step


def read_flights(paths: Sequence[Path]) -> list[Flight]:
    """Return the contents of files, or of all files in folders.

    Raises:
      DataError: there is no file, or one is damaged.
    """
    files = [f for path in paths for f in _files_of(path)]
    if not files:
        places = ", ".join(map(str, paths))
        raise DataError(
            f"there is no flight recorder dump in {places}: the job ended normally, "
            "which removes them, or ran without MPIDIST_DUMPS"
        )
    return [_read(path) for path in files]


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob(f"channel-*{_SUFFIX}"))
    if not path.exists():
        raise DataError(f"there is no {path}")
    return [path.with_suffix(_SUFFIX)]


def _read(path: Path) -> Flight:
    try:
        first, *others = [*_lines(read_regular(path).decode())] or [None]
        number = conform(first, {"format": COUNT})["format"]
        if number != FORMAT:
            raise ValueError(f"format {number}, not {FORMAT}")
        header = conform(first, _HEADER)
        lines = [conform(line, _KIND) for line in others]
        kinds = {line["kind"]: line for line in lines}
        offset = header["time"] - header["monotonic_ns"] / 1e9
        words = np.frombuffer(read_regular(path.with_suffix(".ring")), np.int64)
        calls = dict(_calls(words.reshape(-1, WORDS), kinds, offset))
        members = tuple(header["members"])
        who = header["job"], header["time"], header["channel"], header["rank"]
        return Flight(*who, members, kinds, calls)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a flight recorder dump: {error}") from None


def _lines(text: str) -> Iterator[Any]:
    """Yield the content of each line; a truncated last line is skipped."""
    lines = text.splitlines(keepends=True)
    for line in lines:
        if line.endswith("\n") or line is not lines[-1]:
            yield json.loads(line)


def _calls(
    words: Any, kinds: Collection[int], offset: float
) -> Iterator[tuple[int, Recorded]]:
    for row in words[words[:, NUMBER] > 0].tolist():
        if row[KIND] in kinds:
            begun = row[BEGUN] / 1e9 + offset
            ended = row[ENDED] / 1e9 + offset if row[ENDED] else 0.0
            yield row[NUMBER], Recorded(row[KIND], begun, ended, row[STEP])


def compare(flights: Sequence[Flight]) -> tuple[list[str], bool]:
    """Return the report, line by line, and whether all ranks' calls are equal.

    Of several jobs, the report is on the last one.
    """
    lines: list[str] = []
    is_same = True
    last, jobs = max(flights, key=lambda f: f.time).job, {f.job for f in flights}
    if len(jobs) > 1:
        lines.append(f"the last of {len(jobs)} jobs, in *-job-{last:016x}.jsonl:")
        flights = [flight for flight in flights if flight.job == last]
    channels = sorted({(flight.channel, flight.members) for flight in flights})
    for channel in channels:
        found = [f for f in flights if (f.channel, f.members) == channel]
        found.sort(key=lambda flight: flight.rank)
        said, same = _compare_channel(found)
        number, members = channel
        head = f"communicator {number}, {len(members)} ranks:"
        lines += [head, *(f"  {text}" for text in said)]
        is_same = is_same and same
    return lines, is_same


def _compare_channel(flights: Sequence[Flight]) -> tuple[list[str], bool]:
    lines = []
    present = {flight.rank for flight in flights}
    absent = sorted(set(range(len(flights[0].members))) - present)
    if absent:
        lines.append(f"no dump of {name_ranks(absent)}")
    numbers = sorted({number for flight in flights for number in flight.calls})
    for number in numbers:
        having = [flight for flight in flights if number in flight.calls]
        if len({flight.key(number) for flight in having}) > 1:
            lines.append(f"call {number} is the first that differs:")
            lines += [f"  rank {f.rank}: {f.text(number)}" for f in having]
            return lines, False
    return [*lines, *_ends(flights, numbers)], not absent and _is_even(flights)


def _is_even(flights: Sequence[Flight]) -> bool:
    """Return whether the last call is the same on all ranks and ended."""
    ends = {max(flight.calls, default=0) for flight in flights}
    return len(ends) == 1 and all(f.calls[n].ended for f in flights for n in ends if n)


def _ends(flights: Sequence[Flight], numbers: Sequence[int]) -> Iterator[str]:
    if not numbers:
        yield "no calls"
        return
    last = numbers[-1]
    behind = [f.rank for f in flights if last not in f.calls]
    ahead = next(f for f in flights if last in f.calls)
    texts = [_state(flight) for flight in flights]
    if behind:
        yield (
            f"{name_ranks(behind)} did not reach call {last}, {ahead.text(last)}; all "
            "earlier calls are the same"
        )
    else:
        yield f"calls {numbers[0]} to {last} are the same on all"
    yield f"the last call: {group_by_rank(texts)}"


def _state(flight: Flight) -> str:
    last = max(flight.calls, default=None)
    if last is None:
        return "none"
    operation = flight.kinds[flight.calls[last].kind]["operation"]
    site = flight.kinds[flight.calls[last].kind]["site"]
    ended = "ended" if flight.calls[last].ended else "not ended"
    return f"{last}, {operation} at {site}, {ended}"
