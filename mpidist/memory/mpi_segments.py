"""MPI's own shared memory, which would stay in /dev/shm when a job is killed.

MPICH has a file there for the ranks of a node, Open MPI one of 16 MiB for each rank.
They remove them at the end of MPI, which a job that is killed does not reach, so the
memory stays in use until somebody does. All ranks map them when MPI starts. From then
on the names are of no use, and memory without a name ends with the last process.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from mpi4py import MPI

__all__ = ["remove_names"]

_MAPS = Path("/proc/self/maps")
_OF_NODE = re.compile(r"/dev/shm/mpich_shm_\w+$")
_OF_RANK = re.compile(r"/dev/shm/sm_segment\.[\w.-]+$")
_is_done = False


def remove_names(comm: MPI.Intracomm, node: MPI.Intracomm) -> None:
    """Remove the names, if all ranks of the job that share memory have mapped them.

    Once in a program; where it is not sure, everything stays as it is. Collective.

    Args:
      comm: some or all ranks of the job.
      node: those of them that share memory with this one.
    """
    global _is_done
    is_whole = MPI.Comm.Compare(comm, MPI.COMM_WORLD) in (MPI.CONGRUENT, MPI.SIMILAR)
    if _is_done or not is_whole:
        return
    _is_done = True
    everyone = node.allgather(_mapped())
    names = everyone[0]
    wanted = 1 if all(map(_OF_NODE.match, names)) else node.Get_size()
    if len(names) != wanted or any(found != names for found in everyone):
        return
    if node.Get_rank() == 0:
        for name in names:
            with contextlib.suppress(OSError):
                Path(name).unlink()


def _mapped() -> list[str]:
    """Return the files of MPI that this process has mapped and that have a name."""
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:  # not on Linux
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}
    return sorted(p for p in paths if _OF_NODE.match(p) or _OF_RANK.match(p))
