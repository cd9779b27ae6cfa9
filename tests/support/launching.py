"""Starting MPI jobs from tests, from within an MPI job or without."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpi4py import MPI

# What launchers leave in the environment, and what would confuse an inner one
_LAUNCHER_PREFIXES = (
    "PMI",
    "OMPI_",
    "PMIX_",
    "PRTE_",
    "HYDRA",
    "MPI_",
    "MPIR_",
    "SLURM_",
)
_KEPT_PREFIXES = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_MCA_", "PRTE_MCA_rmaps")
# Ends true hangs only: jobs take a second or two, and many times that on a busy machine
HANG_SECONDS = 600.0
# A launcher whose ranks have ended is left so many looks of that length
_LOOK_SECONDS = 5.0
_LOOKS = 6
# Of the latter these are the launcher's own: Open MPI 4's would end in the outer job
_OUTER_JOB_PREFIXES = ("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix")


def load_job(name: str) -> Any:
    """Return the script `jobs/<name>.py` as a module."""
    folder = str(Path(__file__).parents[2] / "jobs")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what its launcher added."""
    return {
        name: value for name, value in os.environ.items() if not _is_launchers(name)
    } | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _is_launchers(name: str) -> bool:
    if name.startswith(_KEPT_PREFIXES):
        return name.startswith(_OUTER_JOB_PREFIXES)
    return name.startswith(_LAUNCHER_PREFIXES)


def is_open_mpi() -> bool:
    """Return whether this is Open MPI."""
    return "Open MPI" in MPI.Get_library_version()


def mpirun_command(ranks: int, *options: str) -> list[str]:
    """Return the beginning of a command line that starts `ranks` ranks."""
    beside = Path(sys.prefix, "bin", "mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    assert mpirun is not None, "there is no mpirun"
    crowd = ["--oversubscribe"] if is_open_mpi() else []
    return [mpirun, *crowd, *options, "-n", str(ranks)]


def run(
    command: Sequence[str], seconds: float = HANG_SECONDS, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command; end its whole process group if it lasts longer.

    Or if it is Open MPI's launcher, and only that is left: prterun 3 sometimes waits
    for itself when a rank was killed in MPI_Finalize.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment() | environment,
        start_new_session=True,
    )
    end, had_ranks, looks_alone = time.monotonic() + seconds, False, 0
    while True:
        try:
            out, err = process.communicate(timeout=_LOOK_SECONDS)
            break
        except subprocess.TimeoutExpired:
            has_ranks = _has_children(process.pid)
            had_ranks = had_ranks or has_ranks
            looks_alone = 0 if has_ranks or not had_ranks else looks_alone + 1
            if looks_alone < _LOOKS and time.monotonic() < end:
                continue
            is_launcher = looks_alone >= _LOOKS and _name_of(process.pid) == "prterun"
            if not is_launcher and time.monotonic() < end:
                continue
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            if is_launcher:
                break
            raise AssertionError(
                f"{command} still ran after {seconds} s:\n{out}\n{err}"
            ) from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _has_children(pid: int) -> bool:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    with contextlib.suppress(OSError):
        return any(path.read_text().strip() for path in lists)
    return True


def _name_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""
