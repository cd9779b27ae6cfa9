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
_LAUNCHER_PREFIXES = ("PMI", "OMPI_", "PRTE_", "HYDRA", "MPI_", "MPIR_", "SLURM_")
_KEPT_PREFIXES = (
    "OMPI_ALLOW_RUN_AS_ROOT",
    "OMPI_MCA_",
    "PRTE_MCA_rmaps",
    "MPIR_CVAR_",
)
# Ends true hangs only: jobs take a second or two, and many times that on a busy machine
HANG_SECONDS = 600.0
# A launcher without ranks is left so many looks of that length
_LOOK_SECONDS = 5.0
_LOOKS = 12
# Of the latter these are the launcher's own: Open MPI 4's would end in the outer job
_OUTER_JOB_PREFIXES = ("OMPI_MCA_ess", "OMPI_MCA_orte", "OMPI_MCA_pmix")


def load_job(name: str) -> Any:
    """Return the script `jobs/<name>.py` as a module."""
    folder = str(Path(__file__).parents[2] / "jobs")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def clean_environment() -> dict[str, str]:
    """Return this process's environment without what its launcher added.

    And without PYTHONUNBUFFERED, with which `print` writes a line in pieces, among
    which come those of other ranks.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONUNBUFFERED" and not _is_launchers(name)
    }
    return environment | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


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
    end, alone, complaint = time.monotonic() + seconds, 0, ""
    while process.returncode is None:
        try:
            out, err = process.communicate(timeout=_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            alone = alone + 1 if _is_lone_launcher(process.pid) else 0
            if time.monotonic() > end:
                complaint = f"{command} still ran after {seconds} s"
            elif alone < _LOOKS:
                continue
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
    assert not complaint, f"{complaint}:\n{out}\n{err}"
    if alone == _LOOKS:
        err += "prterun had no ranks any more, and waited for itself; it was killed\n"
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _is_lone_launcher(pid: int) -> bool:
    """Return whether a process is Open MPI's launcher, and has no ranks."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        return name == "prterun" and not any(path.read_text() for path in lists)
    return False
