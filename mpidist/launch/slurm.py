"""Parse Slurm's environment variables: packed lists of hosts and tasks."""

from __future__ import annotations

import os
import re

from mpidist.errors import LaunchError

__all__ = ["expand_hosts", "expand_tasks", "read_number", "read_variable"]

_RANGE = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")
_TASKS = re.compile(r"(?P<tasks>\d+)(?:\(x(?P<nodes>\d+)\))?")
_MOST = 1_000_000  # hosts; more are a mistake, not a cluster


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
    if not text.isdecimal():
        raise LaunchError(f"{name} must be a number, not {text!r}")
    return int(text)
