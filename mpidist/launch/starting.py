"""The command line that starts a job here: the right mpirun, or srun.

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
from mpidist.launch.launchers import (
    NO_MPI,
    find_launcher,
    protocol_of,
    run_program,
)
from mpidist.util.available_memory import available_cores, physical_core
from mpidist.util.settings import PREFIX, decimal

_SECONDS = 60
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
      ranks: how many; None takes as many as Slurm has allocated.
      is_crowd: whether there may be more ranks than cores.
      options: for mpirun or srun.
      launcher: "auto", "mpirun" or "srun".
    """

    program: Sequence[str]
    ranks: int | None
    is_crowd: bool = False
    options: Sequence[str] = ()
    launcher: str = "auto"


def find_library() -> Library:
    """Return the MPI library that mpi4py is linked to.

    Raises:
      LaunchError: mpi4py is not there, or finds no library.
    """
    try:
        ended = run_program([sys.executable, "-c", _ASK], _SECONDS)
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
    notes: list[str] = []
    is_srun = request.launcher == "srun"
    if request.launcher == "auto" and "SLURM_JOB_ID" in environ:
        missing = _why_no_srun(library)
        is_srun = not missing
        notes += [f"not by srun: {missing}"] if missing else []
    if is_srun:
        return _srun(request, library, is_inside=started is not None), notes
    return _mpirun(request, library, environ, notes), notes


def _why_no_srun(library: Library) -> str:
    """Return why srun cannot start programs with this library; "" if it can."""
    if shutil.which("srun") is None:
        return "there is no srun"
    if library.family == "Intel":
        return "Intel MPI's mpirun knows Slurm, and srun needs settings for it"
    protocol = protocol_of(library.version)
    offered = _output_of("srun", "--mpi=list")
    names = set(re.findall(r"[\w.]+", offered))
    if not any(name == protocol or name.startswith(f"{protocol}_") for name in names):
        return f"it does not offer --mpi={protocol}, which {library.family} needs"
    return ""


def _srun(request: Request, library: Library, is_inside: bool) -> list[str]:
    command = ["srun", f"--mpi={protocol_of(library.version)}"]
    if request.ranks is not None:
        command += ["-n", str(request.ranks)]
    if is_inside:  # of a step, whose cores the job is to have
        command.append("--overlap")
    if request.is_crowd:
        command.append("--overcommit")
    return [*command, *request.options, *request.program]


def _mpirun(
    request: Request, library: Library, environ: Mapping[str, str], notes: list[str]
) -> list[str]:
    ranks, is_open_mpi = request.ranks, library.family == "Open MPI"
    if ranks is None:
        ranks = decimal(environ.get("SLURM_NTASKS", ""))
    if ranks is None:
        raise LaunchError("give the number of ranks: -n 4")
    command = [str(_find_mpirun(library))]
    if is_open_mpi and os.geteuid() == 0:
        command.append("--allow-run-as-root")
    # Of other nodes only the launcher knows how many cores they have
    has_hosts = any("host" in word for word in request.options)
    if "SLURM_JOB_ID" not in environ and not has_hosts:
        cores = _count_cores(is_whole=is_open_mpi)
        if ranks > cores and not request.is_crowd:
            raise LaunchError(
                f"{ranks} ranks on {cores} core{'s' * (cores > 1)} would wait for each "
                f"other; start {cores}, or pass --oversubscribe"
            )
        if ranks > cores:
            notes.append(f"oversubscribed: {ranks} ranks share {cores} cores")
    if request.is_crowd and is_open_mpi:
        command.append("--oversubscribe")
    if is_open_mpi:  # it hands only its own variables to other nodes
        for name in sorted(name for name in environ if name.startswith(PREFIX)):
            command += ["-x", name]
    return [*command, *request.options, "-n", str(ranks), *request.program]


def _find_mpirun(library: Library) -> Path:
    """Return the mpirun of a library.

    Raises:
      LaunchError: no mpirun of this library is found.
    """
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
    """Return the output of a program; "" if it cannot be run."""
    try:
        ended = run_program(command, _SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout + ended.stderr


def _count_cores(is_whole: bool) -> int:
    """Return how many cores this process may use.

    Args:
      is_whole: whether hardware threads of one core count once, as Open MPI counts.
    """
    cores = available_cores()
    return len(set(map(physical_core, cores)) if is_whole else cores)
