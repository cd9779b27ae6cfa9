"""What batch systems say about a job: its hosts, and when it ends.

Each reader of hosts takes the environment variables and returns how many slots each
host has, in the order of the ranks; an empty dict where nothing is known. Each reader
of time limits returns when the job ends, or None.
"""

from __future__ import annotations

import calendar
import collections
import contextlib
import itertools
import math
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist.errors import LaunchError
from mpidist.util import logs
from mpidist.util.settings import decimal

Environ = Mapping[str, str]
_RANGE = r"[0-9]{1,18}(?:-[0-9]{1,18})?"
_HOSTS = rf"(?:[^\[\],]|\[{_RANGE}(?:,{_RANGE})*\])+"
_MOST = 1_000_000  # hosts; more are a mistake, not a cluster
_END_TIME = "SLURM_JOB_END_TIME"
_ASK_SECONDS = 20
_NO_LIMIT = ("N/A", "NONE", "UNKNOWN", "UNLIMITED")  # among times of squeue
# "node1", "node1 slots=4" (Open MPI), "node1:4" (MPICH), "node1 4 all.q@node1" (SGE)
_HOST_LINE = re.compile(r"([^\s:#]+)(?::(\d{1,9})|\s+(?:slots\s*=\s*)?(\d{1,9})\b)?")


def run_program(
    command: Sequence[str], seconds: float, environ: Environ | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return its exit status, and its output as text.

    Its messages are in English. Bytes that are not valid UTF-8 are replaced.

    Args:
      command: the program, and its arguments.
      seconds: how long it may take.
      environ: its environment variables, by default those of this process.

    Raises:
      OSError: it cannot be started.
      subprocess.TimeoutExpired: it took longer.
    """
    return subprocess.run(
        command,
        env={**(os.environ if environ is None else environ), "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )


def no_hosts(environ: Environ) -> dict[str, int]:
    """Return nothing: only the batch system itself knows the hosts."""
    return {}


def hosts_of_file(*variables: str) -> Callable[[Environ], dict[str, int]]:
    """Return a reader of the file that one of some variables names.

    Each line has a host, and perhaps its slots: one if it has not.
    """

    def read(environ: Environ) -> dict[str, int]:
        hosts: collections.Counter[str] = collections.Counter()
        path = next((environ[name] for name in variables if environ.get(name)), "")
        with contextlib.suppress(OSError, ValueError):
            for line in Path(path).read_text(errors="replace").splitlines():
                if match := _HOST_LINE.match(line.strip()):
                    hosts[match[1]] += int(match[2] or match[3] or 1)
        return dict(hosts)

    return read


def hosts_of_lsf(environ: Environ) -> dict[str, int]:
    """Return LSF's hosts: "node1 4 node2 4", or each host once for each slot."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()
    slots = [decimal(word) for word in words[1::2]]
    if words and None not in slots and len(slots) == len(words[::2]):
        return {host: n or 0 for host, n in zip(words[::2], slots, strict=True)}
    names = environ.get("LSB_HOSTS", "").split()
    return dict(collections.Counter(names)) or _FILE_OF_LSF(environ)


_FILE_OF_LSF = hosts_of_file("LSB_DJOB_HOSTFILE")


def hosts_of_slurm(environ: Environ) -> dict[str, int]:
    """Return Slurm's hosts, with the tasks of each, or its processors."""
    names = "SLURM_TASKS_PER_NODE", "SLURM_JOB_CPUS_PER_NODE"
    slots = next((environ[name] for name in names if environ.get(name)), "")
    with contextlib.suppress(LaunchError):
        hosts = expand_hosts(environ.get("SLURM_JOB_NODELIST", ""))
        return dict(zip(hosts, expand_tasks(slots), strict=False))
    return {}


def expand_hosts(text: str) -> list[str]:
    """Return the names in a list of hosts like "n[1-3],m5,gpu[08,10]-ib".

    Raises:
      LaunchError: it is none.
    """
    if not re.fullmatch(f"{_HOSTS}(?:,{_HOSTS})*", text):
        raise LaunchError(f"{text!r} is not a list of hosts")
    hosts: list[str] = []
    for word in re.findall(_HOSTS, text):
        # Every other part stood in brackets
        parts = [[part] for part in re.split(r"\[(.*?)\]", word)]
        parts[1::2] = [_expand_ranges(ranges, text) for (ranges,) in parts[1::2]]
        hosts += map("".join, itertools.product(*parts))
    return hosts


def _expand_ranges(ranges: str, text: str) -> list[str]:
    numbers: list[str] = []
    for word in ranges.split(","):
        first, _, last = word.partition("-")
        wanted = range(int(first), int(last or first) + 1)
        if not 0 < len(wanted) <= _MOST:
            raise LaunchError(f"{text!r} is not a list of hosts: {word!r}")
        numbers += [f"{i:0{len(first)}}" for i in wanted]
    return numbers


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks of each host from a text like "3(x2),1".

    Raises:
      LaunchError: it is none.
    """
    tasks: list[int] = []
    for word in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([1-9][0-9]{0,5})\))?", word)
        if match is None:
            raise LaunchError(f"{text!r} is not a list of tasks")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


class TimeLimit(NamedTuple):
    """When a job ends.

    Args:
      end: on `time.time`'s clock; math.inf if there is no limit.
      source: the variable or the program that says so.
    """

    end: float
    source: str


def end_of_slurm(environ: Environ) -> TimeLimit | None:
    """Return when Slurm ends the job: SLURM_JOB_END_TIME, or what squeue says."""
    text = environ.get(_END_TIME, "0")
    end = decimal(text)
    if end:
        return TimeLimit(float(end), _END_TIME)
    if end is None:
        _warn("Slurm", f"{_END_TIME}={text!r} is not a number of seconds")
    if "SLURM_JOB_ID" not in environ:
        return None
    try:
        return TimeLimit(_ask_squeue(environ), "squeue")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _warn("Slurm", f"squeue: {error}")
        return None


def end_of_flux(environ: Environ) -> TimeLimit | None:
    """Return when Flux ends the job, or the instance of Flux that runs it."""
    if not any(name in environ for name in ("FLUX_JOB_ID", "FLUX_ENCLOSING_ID")):
        return None
    command = ["flux", "job", "timeleft"]
    try:
        ended = run_program(command, _ASK_SECONDS, environ)
        if ended.returncode:
            raise ValueError(ended.stderr.strip() or f"status {ended.returncode}")
        left = float(ended.stdout)
        if not left >= 0:
            raise ValueError(f"{ended.stdout.strip()!r} is not a number of seconds")
        return TimeLimit(time.time() + left, " ".join(command))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _warn("Flux", f"{' '.join(command)}: {error}")
        return None


def no_end(environ: Environ) -> TimeLimit | None:
    """Return None: this launcher does not say when the job ends."""
    return None


def _warn(system: str, reason: str) -> None:
    logs.warning("launch", f"when {system} will end this job is unknown: {reason}")


def _ask_squeue(environ: Environ) -> float:
    job, task = environ["SLURM_JOB_ID"], environ.get("SLURM_ARRAY_TASK_ID")
    if task and "SLURM_ARRAY_JOB_ID" in environ:
        # One of an array's jobs has the number of the array
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{task}"
    # The user's own options of squeue may hide the job
    kept = {k: v for k, v in environ.items() if not k.startswith("SQUEUE_")}
    # Local times occur twice when a clock is set back
    kept |= {"SLURM_TIME_FORMAT": "standard", "TZ": "UTC0"}
    command = ["squeue", "--noheader", f"--jobs={job}", "--format=%e"]
    ended = run_program(command, _ASK_SECONDS, kept)
    if ended.returncode:
        raise ValueError(ended.stderr.strip() or f"exit status {ended.returncode}")
    return _first_end(ended.stdout)


def _first_end(text: str) -> float:
    """Return the earliest of squeue's times: there is one for each part of a job.

    Raises:
      ValueError: there is none.
    """
    ends, others = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.upper() in _NO_LIMIT:
            ends.append(math.inf)
        elif re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", line, re.ASCII):
            ends.append(calendar.timegm(time.strptime(line, "%Y-%m-%dT%H:%M:%S")))
        else:
            others.append(line)
    if not ends:
        raise ValueError(f"{others[0]!r} is not a time" if others else "no such job")
    if others:
        logs.warning("launch", f"squeue: {others[0]!r} is not a time, and is ignored")
    return float(min(ends))
