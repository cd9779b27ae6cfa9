"""Run other programs for their output, whatever the user's locale and settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence

__all__ = ["run"]


def run(
    command: Sequence[str],
    seconds: float,
    environ: Mapping[str, str] | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return its exit status, and its output as text.

    Its messages are in English. Bytes that are not valid UTF-8 are replaced.

    Args:
      command: the program, and its arguments.
      seconds: how long it may take.
      environ: its environment variables, by default those of this process.
      variables: further ones.

    Raises:
      OSError: it cannot be started.
      subprocess.TimeoutExpired: it took longer.
    """
    return subprocess.run(
        command,
        env={**(os.environ if environ is None else environ), "LC_ALL": "C"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=seconds,
        check=False,
    )
