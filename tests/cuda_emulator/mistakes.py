#!/usr/bin/env python3
"""Make mistakes in a copy of mpidist, one at a time, and see that tests fail.

    . OUT/env.sh && .venv/bin/python tests/cuda_emulator/mistakes.py [NAME...]

Each must fail by the tests named here, and only then: these pass without it. Where
GATE_CUDA_LAB names no CUDA-aware Open MPI, a mistake that only this shows is left
out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LATE = {"CUDA_EMULATOR_STREAMS": "late"}
SECONDS = 300


class Mistake(NamedTuple):
    """A piece of code, and what takes its place.

    Args:
      name: what is wrong.
      file: in mpidist.
      right: the code; it is there once.
      wrong: what it is replaced by.
      tests: pytest's arguments.
      environ: of the job that runs the tests.
      ranks: of the job.
      needs_mpi: whether its MPI has to take addresses of GPUs.
    """

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...]
    environ: Mapping[str, str] = LATE
    ranks: int = 2
    needs_mpi: bool = False


UPLOADS = "tests/device/test_host_to_device.py"
GPU = "tests/device/test_gpu.py"
TRANSPORTS = "tests/comm/transports/test_transports.py"

MISTAKES = [
    Mistake(
        "MPI sends a host buffer before the GPU has written it",
        "device/copies.py",
        "self.event.synchronize()\n        return self.bytes",
        "return self.bytes",
        (TRANSPORTS, "-k", "test_sums and staging"),
    ),
    Mistake(
        "the current stream does not wait for the copies of a result",
        "device/copies.py",
        "here.wait_event(record(stream))",
        "pass",
        (GPU, "-k", "late_kernel and staging and 2000000"),
    ),
    Mistake(
        "a small array is read before it has come from the GPU",
        "device/copies.py",
        "        stream.synchronize()\n",
        "",
        (GPU, "-k", "shapes_stay"),
    ),
    Mistake(
        "a slot is written while other ranks read it",
        "comm/transports/ipc.py",
        "SLOTS = 4",
        "SLOTS = 1",
        (TRANSPORTS, "-k", "ipc"),
    ),
    Mistake(
        "ranks meet before a slot is written",
        "comm/transports/ipc.py",
        "done.synchronize()\n"
        '            self._synchronize("all_reduce", deadline)\n            if all_add',
        'self._synchronize("all_reduce", deadline)\n            if all_add',
        (TRANSPORTS, "-k", "test_sums and ipc"),
    ),
    Mistake(
        "operations on several streams do not come one after the other",
        "device/streams.py",
        "self._last = record()",
        "self._last = None",
        (GPU, "-k", "late_kernel and ipc and changing"),
    ),
    Mistake(
        "a handle of another process's memory is not closed",
        "comm/transports/ipc.py",
        "runtime.ipcCloseMemHandle(address)",
        "pass",
        (GPU, "-k", "frees_all"),
    ),
    Mistake(
        "a kernel is given an address of the host",
        "device/kernels.py",
        "*numbers, totals.data.ptr, count",
        "*numbers, table.ctypes.data, count",
        (TRANSPORTS, "-k", "test_sums and ipc"),
    ),
    Mistake(
        "a kernel leaves out the last number",
        "device/kernels.cu",
        "size / width * width, size);",
        "size / width * width, size - 1);",
        (TRANSPORTS, "-k", "test_sums and ipc"),
    ),
    Mistake(
        "MPI that knows nothing of GPUs is given their addresses",
        "comm/transports/selector.py",
        "if not gpus.support.is_aware:",
        "if consensus.size == 1:",
        (GPU, "-k", "shapes_stay and MPI"),
    ),
    Mistake(
        "gradients are reduced before they are computed",
        "device/streams.py",
        "for event in (self._begun, *after):",
        "for event in ():",
        (GPU, "-k", "buckets"),
    ),
    Mistake(
        "page-locked memory is given back while it is copied",
        "device/host_to_device.py",
        "slot.leaves.extend(leaves[i] for i in layout.as_they_lie)",
        "pass",
        (UPLOADS, "-k", "what_is_uploaded_arrives and cuda"),
        ranks=1,
    ),
    Mistake(
        "a batch overwrites one that nobody has taken",
        "device/host_to_device.py",
        "        if slot.taken is not None:\n            stream.wait(slot.taken)\n"
        "        slot.leaves",
        "        slot.leaves",
        (UPLOADS, "-k", "current_stream_may or belong_to or threads_upload"),
        ranks=1,
    ),
    Mistake(
        "an array is freed while it is copied",
        "device/streams.py",
        "here.wait_event(sent)  # before",
        "pass  # before",
        (UPLOADS, "-k", "what_is_uploaded_arrives and cuda"),
        ranks=1,
    ),
    Mistake(
        "NCCL is told another stream than the current one",
        "comm/transports/nccl.py",
        "return int(cupy.cuda.get_current_stream().ptr)",
        "return 0",
        (GPU, "-k", "late_kernel and nccl"),
        {**LATE, "CUDA_EMULATOR_DEVICES": "2"},
    ),
    Mistake(
        "MPI reads memory of a GPU before that has written it",
        "comm/transports/device.py",
        "        arrays.synchronize(send)\n        super().alltoallv",
        "        super().alltoallv",
        (GPU, "-k", "late_kernel and device and (own or changing)"),
        needs_mpi=True,
    ),
]


class Result(NamedTuple):
    """What came of a job."""

    status: int
    seconds: float
    why: str


def run(folder: Path, mistake: Mistake, mpi: Path | None) -> Result:
    """Run a mistake's tests on the mpidist of a folder."""
    environ = dict(os.environ) | dict(mistake.environ)
    environ |= {"MPIDIST_ALLOW_SHARED_GPU": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    mpirun = [str(Path(sys.prefix, "bin", "mpirun"))]
    if mistake.needs_mpi:
        assert mpi is not None
        mpirun = [str(mpi / "bin" / "mpirun"), "--oversubscribe"]
        environ |= variables_of(mpi)
    python = [sys.executable, "-m", "pytest", "-q", "-x", "--color=no", "-m", "gpu"]
    begun = time.monotonic()
    process = subprocess.Popen(
        [*mpirun, "-n", str(mistake.ranks), *python, *mistake.tests],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        output, _ = process.communicate()
        output += "\nE   it did not end"
    errors = [line for line in output.splitlines() if line.startswith("E  ")]
    signs = [
        line for line in output.splitlines() if "emulator:" in line or "signal" in line
    ]
    why = (signs or errors or output.splitlines()[-1:] or [""])[0]
    return Result(process.returncode, time.monotonic() - begun, " ".join(why.split()))


def variables_of(mpi: Path) -> dict[str, str]:
    """Return what a relocated Open MPI needs."""
    names = "OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX"
    return dict.fromkeys(names, str(mpi)) | {
        "MPI4PY_LIBMPI": str(mpi / "lib" / "libmpi.so.40"),
        "MPIDIST_CUDA_AWARE": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def main(names: list[str]) -> int:
    """Return 0 if each mistake is found."""
    chosen = [m for m in MISTAKES if not names or m.name in names]
    for mistake in chosen:
        if (ROOT / "mpidist" / mistake.file).read_text().count(mistake.right) != 1:
            raise SystemExit(f"{mistake.file} does not hold once: {mistake.right}")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="mistakes-") as temporary:
        folder, mpi = Path(temporary), None
        for part in ("mpidist", "tests", "jobs"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", folder)
        lab = os.environ.get("GATE_CUDA_LAB")
        if lab:
            with tarfile.open(Path(lab, "ompi-cuda.tar.xz")) as archive:
                archive.extractall(folder, filter="data")
            mpi = folder / "ompi-cuda"
        for mistake in chosen:
            if mistake.needs_mpi and mpi is None:
                print(f"left out: {mistake.name} (there is no CUDA-aware MPI)")
                continue
            path = folder / "mpidist" / mistake.file
            text = path.read_text()
            control = run(folder, mistake, mpi)
            path.write_text(text.replace(mistake.right, mistake.wrong))
            result = run(folder, mistake, mpi)
            path.write_text(text)
            is_found = control.status == 0 != result.status
            missed += not is_found
            verdict = "found" if is_found else "NOT FOUND"
            if control.status:
                verdict = f"fails without it, too ({control.why})"
            print(f"{verdict}: {mistake.name}\n    {' '.join(mistake.tests)}")
            print(f"    {result.seconds:.0f} s: {result.why}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
