"""The command line that starts a job here: the right mpirun, srun, or flux run.

It uses the mpirun of the MPI library that mpi4py is linked to: another one would start
separate jobs of one rank. A child process determines the library without initialising
MPI, so that a library that cannot be loaded ends only the child.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist.errors import LaunchError
from mpidist.launch.allocations import run_program
from mpidist.launch.commands import python_child
from mpidist.launch.launchers import (
    FLUX,
    NO_MPI,
    SRUN,
    Launcher,
    Starter,
    find_job,
    find_launcher,
)
from mpidist.util.available_memory import available_cores, physical_core
from mpidist.util.settings import PREFIX, decimal

_SECONDS = 60
_NO_RANKS = "give the number of ranks: -n 4"
STARTERS = {"srun": SRUN, "flux": FLUX}  # by the name of their program
# Options of mpirun that say on which hosts the ranks run
_HOSTS = re.compile(r"--?(f|H|[\w-]*(host|machine|rankfile|config|app)[\w-]*)(=.*)?")
_ASK = """
import json, re, sys
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
maps = open("/proc/self/maps", errors="surrogateescape").read()
pattern = r"^\\S+ r\\S+ .*?(/\\S*/libmpi(?:_cray|ch|_abi)?\\.so[.\\d]*)$"
found = re.search(pattern, maps, re.MULTILINE)
answer = [MPI.Get_library_version(), found and found[1]]
sys.stdout.write("\\nmpidist: " + json.dumps(answer) + "\\n")
"""
# Text in the version of an mpirun, and in the version of its library
_FAMILIES = {
    "Open MPI": "Open MPI|prterun|PRRTE|OpenRTE",
    "Intel": r"Intel\(R\) MPI",
    "MVAPICH": "HYDRA",
    "CRAY MPICH": "HYDRA|PALS",
    "MPICH": "HYDRA",
}


class Library(NamedTuple):
    """The MPI library that mpi4py is linked to.

    Args:
      version: `MPI.Get_library_version()`.
      path: of its file; None if unknown.
    """

    version: str
    path: Path | None

    @property
    def family(self) -> str:
        """Whose it is: one of the names in `_FAMILIES`; "" of another one."""
        return next((name for name in _FAMILIES if name in self.version), "")


class Request(NamedTuple):
    """The user's request.

    Args:
      program: the command line of each rank.
      ranks: how many; None takes as many as the batch system has allocated.
      oversubscribe: whether there may be more ranks than cores.
      options: for the launcher.
      launcher: "auto", "mpirun", or one of `STARTERS`.
    """

    program: Sequence[str]
    ranks: int | None
    oversubscribe: bool = False
    options: Sequence[str] = ()
    launcher: str = "auto"


def find_library() -> Library:
    """Return the MPI library that mpi4py is linked to.

    Raises:
      LaunchError: mpi4py is not there, or finds no library.
    """
    try:
        ended = run_program(python_child(_ASK), _SECONDS)
    except subprocess.TimeoutExpired:
        raise LaunchError(f"importing mpi4py took longer than {_SECONDS} s") from None
    # Other packages may print, too
    answer = re.search(r"^mpidist: (.*)$", ended.stdout, re.MULTILINE)
    if ended.returncode or answer is None:
        reason = (ended.stderr.strip() or "nothing on stderr").splitlines()[-1]
        raise LaunchError(f"mpi4py finds no MPI library ({reason}): {NO_MPI}")
    version, path = json.loads(answer[1])
    return Library(version, None if path is None else Path(path))


def program(words: Sequence[str]) -> list[str]:
    """Return the command line of a rank: a script, `-m module`, or an executable.

    Raises:
      LaunchError: there is no such file.
    """
    first = words[0]
    if first in ("-m", "-c"):
        return [sys.executable, *words]
    path = Path(first)
    if path.suffix == ".py" or (path.is_file() and not os.access(path, os.X_OK)):
        if not path.is_file():
            raise LaunchError(f"there is no file {first}")
        return [sys.executable, *words]
    if shutil.which(first) is None and not os.access(path, os.X_OK):
        raise LaunchError(f"{first} is not a Python script or a program")
    return list(words)


def start_command(
    request: Request, library: Library, environ: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the command line that starts a job, and notes for the user.

    Args:
      request: what is asked for.
      library: see `find_library`.
      environ: the environment variables.

    Raises:
      LaunchError: no launcher can start it as requested.
    """
    started = find_launcher(environ)
    if started is not None and started.processes > 1:
        raise LaunchError(
            f"{started.launcher} has started this process already, as one of "
            f"{started.processes}; call `mpidist run` outside the job"
        )
    job, notes = find_job(environ), []
    starter = None
    if request.launcher in STARTERS:
        starter = STARTERS[request.launcher].starter
    elif request.launcher == "auto" and job is not None and job.starter is not None:
        missing = _why_not(job.starter, library)
        starter = None if missing else job.starter
        notes = [f"not by {job.name}: {missing}"] if missing else []
    if starter is not None:
        return _start_by(
            starter, request, library, is_inside=started is not None
        ), notes
    return _mpirun(request, library, environ, job, notes), notes


def _why_not(starter: Starter, library: Library) -> str:
    """Return why a starter cannot start programs with this library; "" if it can."""
    program, *options = starter.options(library.version)
    if shutil.which(program) is None:
        return f"there is no {program}"
    if starter is not SRUN.starter:
        return ""
    if library.family == "Intel":
        return "Intel MPI's mpirun knows Slurm, and srun needs settings for it"
    (protocol,) = (option.removeprefix("--mpi=") for option in options)
    offered = _output_of("srun", "--mpi=list")
    names = set(re.findall(r"[\w.]+", offered))
    if not any(name == protocol or name.startswith(f"{protocol}_") for name in names):
        return f"it does not offer --mpi={protocol}, which {library.family} needs"
    return ""


def _start_by(
    starter: Starter, request: Request, library: Library, is_inside: bool
) -> list[str]:
    command = starter.options(library.version)
    if request.ranks is None and not starter.knows_size:
        raise LaunchError(_NO_RANKS)
    if request.ranks is not None:
        command += ["-n", str(request.ranks)]
    if is_inside:
        command += starter.inside
    if request.oversubscribe:
        command += starter.crowd
    return [*command, *request.options, *request.program]


def _mpirun(
    request: Request,
    library: Library,
    environ: Mapping[str, str],
    job: Launcher | None,
    notes: list[str],
) -> list[str]:
    is_here, slots = _find_slots(job, environ)
    ranks = slots if request.ranks is None else request.ranks
    if not ranks:
        raise LaunchError(_NO_RANKS)
    is_open_mpi = library.family == "Open MPI"
    command = [str(_find_mpirun(library))]
    if is_open_mpi and os.geteuid() == 0:
        command.append("--allow-run-as-root")
    # Of other nodes only the launcher knows how many cores they have
    if is_here and not any(map(_HOSTS.fullmatch, request.options)):
        cores = max(_count_cores(is_whole=is_open_mpi), slots)
        if ranks > cores and not request.oversubscribe:
            raise LaunchError(
                f"{ranks} ranks on {cores} core{'s' * (cores > 1)} would wait for each "
                f"other; start {cores}, or pass --oversubscribe"
            )
        if ranks > cores:
            notes.append(f"oversubscribed: {ranks} ranks share {cores} cores")
    if request.oversubscribe and is_open_mpi:
        command.append("--oversubscribe")
    if is_open_mpi:  # it hands only its own variables to other nodes
        for name in sorted(name for name in environ if name.startswith(PREFIX)):
            command += ["-x", name]
    return [*command, *request.options, "-n", str(ranks), *request.program]


def _find_slots(
    launcher: Launcher | None, environ: Mapping[str, str]
) -> tuple[bool, int]:
    """Return whether all ranks would run on this node, and how many have room.

    0 if the batch system, if there is one, does not say how many.
    """
    if launcher is None or launcher.job is None:
        return True, 0
    hosts = launcher.job.hosts(environ)
    slots = decimal(environ.get(launcher.job.slots, "")) or sum(hosts.values())
    names = {name.partition(".")[0] for name in hosts}
    return names == {os.uname().nodename.partition(".")[0]}, slots


def _find_mpirun(library: Library) -> Path:
    """Return the mpirun of a library."""
    folders = [] if library.path is None else list(library.path.parents)[1:5]
    names = ["mpirun", "mpiexec"]
    if library.family == "Open MPI":
        names.insert(0, "mpirun.openmpi")  # as Debian and Ubuntu name it
    elif library.family == "MPICH":
        names.insert(0, "mpirun.mpich")
    candidates = [folder / "bin" / name for folder in folders for name in names]
    candidates += [Path(there) for name in names if (there := shutil.which(name))]
    checked = []
    for path in dict.fromkeys(candidates):
        if not path.is_file():
            continue
        checked.append(str(path))
        version = _output_of(str(path), "--version")
        if re.search(_FAMILIES.get(library.family, ""), version):
            return path
    others = f", but only {', '.join(checked)}" if checked else ""
    name = library.version.partition("\n")[0].partition(",")[0].strip("\0 \t")
    raise LaunchError(
        f"there is no mpirun of {name}, which mpi4py is linked to{others}; install it, "
        "or load its module"
    )


def _output_of(*command: str) -> str:
    try:
        ended = run_program(command, _SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout + ended.stderr


def _count_cores(is_whole: bool) -> int:
    """Return how many cores this process may use."""
    cores = available_cores()
    return len(set(map(physical_core, cores)) if is_whole else cores)
