"""What Slurm says about a job: lists of hosts and tasks, and when it ends."""

from __future__ import annotations

import calendar
import math
import os
import re
import subprocess
import time
from collections.abc import Mapping
from typing import NamedTuple

from mpidist.errors import LaunchError
from mpidist.util import logs, programs
from mpidist.util.settings import decimal

__all__ = [
    "TimeLimit",
    "expand_hosts",
    "expand_tasks",
    "read_number",
    "read_variable",
    "time_limit",
]

_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")
_TASKS = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?")
_MOST = 1_000_000  # hosts; more are a mistake, not a cluster
_END_TIME = "SLURM_JOB_END_TIME"
_SQUEUE_SECONDS = 20
_NO_LIMIT = ("N/A", "NONE", "UNKNOWN", "UNLIMITED")  # among times of squeue


def expand_hosts(text: str) -> list[str]:
    """Return the names in a list of hosts like "n[1-3],m5,gpu[08,10]-ib".

    Raises:
      LaunchError: it is none.
    """
    hosts = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\]?)+", text):
        names = [""]
        for part in re.findall(r"[^\[]+|\[[^\]]*\]?", word):
            names = [name + end for name in names for end in _alternatives(part, text)]
        hosts += names
    if not hosts or "" in hosts:
        raise LaunchError(f"{text!r} is not a list of hosts")
    return hosts


def _alternatives(part: str, text: str) -> list[str]:
    """Return the numbers in brackets, with leading zeros; other parts as they are."""
    if not part.startswith("[") and "]" not in part:
        return [part]
    found = []
    for word in part.strip("[]").split(","):
        match = _RANGE.fullmatch(word)
        if match is None or not re.fullmatch(r"\[[^\]]*\]", part):
            raise LaunchError(f"{text!r} is not a list of hosts: {part!r}")
        first, last = match["first"], match["last"] or match["first"]
        if not 0 <= int(last) - int(first) < _MOST:
            raise LaunchError(f"{text!r} is not a list of hosts: {word!r}")
        found += [f"{i:0{len(first)}}" for i in range(int(first), int(last) + 1)]
    return found


def expand_tasks(text: str) -> list[int]:
    """Return the number of tasks of each host from a text like "3(x2),1".

    Raises:
      LaunchError: it is none.
    """
    tasks = []
    for word in text.split(","):
        match = _TASKS.fullmatch(word)
        if match is None or len(word) > 20 or int(match["nodes"] or 1) > _MOST:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not a list of tasks"
            )
        tasks += [int(match["tasks"])] * int(match["nodes"] or 1)
    return tasks


def read_variable(name: str) -> str:
    """Return a variable of a job step.

    Raises:
      LaunchError: it is not set.
    """
    text = os.environ.get(name)
    if text is None:
        raise LaunchError(
            f"{name} is not set: this process was not started by Slurm's srun"
        )
    return text


def read_number(name: str) -> int:
    """Return a variable of a job step that is a number.

    Raises:
      LaunchError: it is not set, or not a number.
    """
    text = read_variable(name)
    number = decimal(text)
    if number is None:
        raise LaunchError(f"{name} must be a number, not {text!r}")
    return number


class TimeLimit(NamedTuple):
    """When a job ends.

    Args:
      end: on `time.time`'s clock; math.inf if there is no limit.
      source: the variable or the program that says so.
    """

    end: float
    source: str


def time_limit(environ: Mapping[str, str]) -> TimeLimit:
    """Return when Slurm will end this job; a warning is logged if that is unknown.

    Args:
      environ: the environment variables of this process.
    """
    text = environ.get(_END_TIME, "0")
    end = decimal(text)
    if end:
        return TimeLimit(float(end), _END_TIME)
    if end is None:
        _warn(f"{_END_TIME}={text!r} is not a number of seconds")
    if "SLURM_JOB_ID" not in environ:
        return TimeLimit(math.inf, "")
    try:
        return TimeLimit(_ask_squeue(environ), "squeue")
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _warn(f"squeue: {error}")
        return TimeLimit(math.inf, "")


def _warn(reason: str) -> None:
    logs.warning("launch", f"when Slurm will end this job is unknown: {reason}")


def _ask_squeue(environ: Mapping[str, str]) -> float:
    job, task = environ["SLURM_JOB_ID"], environ.get("SLURM_ARRAY_TASK_ID")
    if task and "SLURM_ARRAY_JOB_ID" in environ:
        # One of an array's jobs has the number of the array
        job = f"{environ['SLURM_ARRAY_JOB_ID']}_{task}"
    # The user's own options of squeue may hide the job
    kept = {k: v for k, v in environ.items() if not k.startswith("SQUEUE_")}
    ended = programs.run(
        ["squeue", "--noheader", f"--jobs={job}", "--format=%e"],
        _SQUEUE_SECONDS,
        kept,
        SLURM_TIME_FORMAT="standard",
        TZ="UTC0",  # local times occur twice when a clock is set back
    )
    if ended.returncode:
        said = ended.stderr.strip() or f"exit status {ended.returncode}"
        raise ValueError(said)
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
