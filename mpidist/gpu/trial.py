"""Trying MPI on a GPU's memory in a job of its own, so that a crash is an answer.

`run` starts this module as a program, on two ranks if there is an mpirun beside the MPI
library, else on one. Each call of the program is one that mpidist makes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["library_path", "run"]

_SECONDS = 60
_DONE = "mpidist: MPI took addresses of GPU memory"
# Where a job would find that it is a part of this one
_LAUNCHERS = (
    "ALPS_",
    "FLUX_",
    "HYDI_",
    "HYDRA_",
    "LSB_",
    "MPI_LOCAL",
    "MV2_COMM_",
    "OMPI_COMM_",
    "OMPI_FILE_",
    "OMPI_FIRST_",
    "OMPI_MCA_ess",
    "OMPI_MCA_initial",
    "OMPI_MCA_orte",
    "OMPI_MCA_plm",
    "OMPI_UNIVERSE",
    "PALS_",
    "PBS_",
    "PMI",
    "PRTE_",
    "SLURM_",
)
_KEPT = ("PRTE_PREFIX", "PMIX_PREFIX")


def run(index: int) -> tuple[bool, str]:
    """Return whether MPI takes addresses of GPU `index`, and what came of it."""
    environ = _clean(os.environ)
    program = [sys.executable, "-m", "mpidist.gpu.trial", str(index)]
    alone = _run_one(program, environ)
    if alone:
        return False, f"tried on one rank: {alone}"
    mpirun = _mpirun(library_path())
    if mpirun is None:
        return True, "tried on one rank"
    together = _run_one([str(mpirun), "-n", "2", *program], environ)
    if together:
        return False, f"tried by {mpirun} on two ranks: {together}"
    return True, "tried on two ranks"


def _run_one(command: list[str], environ: Mapping[str, str]) -> str:
    """Return why a command did not do what it should; nothing if it did."""
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return f"no end after {_SECONDS} s"
    if _DONE in out and process.returncode == 0:
        return ""
    if process.returncode < 0:
        return f"it ended by {signal.Signals(-process.returncode).name}"
    lines = [line for line in err.splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "nothing on stderr"
    return f"it ended with {process.returncode}: {last}"


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job that is none of this job's."""
    kept = {
        name: value
        for name, value in environ.items()
        if name in _KEPT or not name.startswith(_LAUNCHERS)
    }
    kept["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    # More processes than cores are no reason to refuse two
    kept.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    kept.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
    kept["MPIDIST_BIND_GPU"] = "0"
    return kept


def library_path() -> Path | None:
    """Return the file of the MPI library that this process has loaded."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:  # not on Linux
        return None
    pattern = r"^\S+ r\S+ .*?(/\S*/libmpi(?:_cray|ch)?\.so[.\d]*)$"
    found = re.search(pattern, maps, re.MULTILINE)
    return None if found is None else Path(found[1])


def _mpirun(library: Path | None) -> Path | None:
    """Return the mpirun that was installed with a library."""
    for folder in () if library is None else library.parents[1:3]:
        mpirun = folder / "bin" / "mpirun"
        if mpirun.exists():
            return mpirun
    return None


def _main(index: int) -> None:
    """Make the calls of MPI that mpidist makes, on memory of a GPU, and check them."""
    import cupy

    cupy.cuda.Device(index).use()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    # What goes at once, and what goes by rendezvous
    for count in (16, 1 << 20):
        ours = cupy.full(count, rank + 1, "f4")
        total, everyone = cupy.zeros(count, "f4"), cupy.zeros(count * size, "f4")
        cupy.cuda.Device().synchronize()
        comm.Allreduce(ours, total)
        assert (total == size * (size + 1) / 2).all(), "Allreduce"
        counts = [count] * size
        comm.Allgatherv(ours, [everyone, counts])
        expected = cupy.repeat(cupy.arange(1, size + 1, dtype="f4"), count)
        assert (everyone == expected).all(), "Allgatherv"
        everyone[...] = 0
        cupy.cuda.Device().synchronize()
        tiled = cupy.tile(ours, size)
        cupy.cuda.Device().synchronize()
        comm.Alltoallv([tiled, counts], [everyone, counts])
        assert (everyone == expected).all(), "Alltoallv"
        comm.Bcast(ours, 0)
        assert (ours == 1).all(), "Bcast"
    comm.Barrier()
    if rank == 0:
        print(_DONE, flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
