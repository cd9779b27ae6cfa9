"""Print, as JSON, what a benchmark of GPUs needs to know before it starts MPI jobs.

In a process of its own, since it loads MPI, and a process in MPI starts no MPI jobs.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from mpi4py import MPI

from mpidist.device import probe
from mpidist.device.binding import gpu_count

__all__: list[str] = []


def why_no_gpu() -> str:
    """Return why CuPy can use no GPU."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    import cupy

    try:
        return f"CuPy {cupy.__version__} sees {cupy.cuda.runtime.getDeviceCount()}"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy {cupy.__version__} says: {error}"


def launchers() -> Iterator[Path]:
    """Yield where an mpirun may be, the one that belongs to the MPI library first."""
    library = probe.library_path()
    for folder in () if library is None else library.parents[1:3]:
        yield folder / "bin" / "mpirun"
    yield Path(sys.executable).parent / "mpirun"
    found = shutil.which("mpirun")
    if found is not None:
        yield Path(found)


def main() -> None:
    count = gpu_count()
    mpirun = next((path for path in launchers() if path.exists()), None)
    found = {
        "gpus": count,
        "why": "" if count else why_no_gpu(),
        "mpi": MPI.Get_library_version().partition("\n")[0].rstrip("\0 "),
        "mpirun": None if mpirun is None else str(mpirun),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
