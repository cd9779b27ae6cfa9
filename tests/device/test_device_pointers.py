"""MPI on addresses of GPUs without a GPU: a driver whose memory the host cannot read.

GATE_CUDA_LAB names a folder with a CUDA-aware Open MPI (ompi-cuda.tar.xz) and the
source of such a driver (build-fake.sh). Without it, or without CUDA's headers, these
tests are skipped, and say so.
"""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import launching
import pytest

JOB = Path(__file__).parents[1] / "jobs" / "device_pointers_job.py"


def cuda_headers():
    """Return a folder whose `include` has cuda.h."""
    homes = [Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"))]
    for path in map(Path, sys.path):
        homes += path.glob("nvidia/cu*")
    return next((home for home in homes if (home / "include/cuda.h").exists()), None)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """What a job needs that uses this MPI and this driver."""
    lab = Path(os.environ.get("GATE_CUDA_LAB") or "/not-given")
    if not lab.exists():
        pytest.skip("GATE_CUDA_LAB names no folder with a CUDA-aware MPI")
    headers = cuda_headers()
    if headers is None:
        pytest.skip("there are no headers of CUDA: pip install nvidia-cuda-runtime")
    folder = tmp_path_factory.mktemp("cuda")
    with tarfile.open(lab / "ompi-cuda.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    subprocess.run(
        ["bash", str(lab / "build-fake.sh"), str(folder / "driver")],
        env={**os.environ, "CUDA": str(headers)},
        check=True,
        capture_output=True,
    )
    mpi = folder / "ompi-cuda"
    return {
        "OPAL_PREFIX": str(mpi),
        "PRTE_PREFIX": str(mpi),
        "PMIX_PREFIX": str(mpi),
        "MPI4PY_LIBMPI": str(mpi / "lib/libmpi.so.40"),
        "OMPI_MCA_pml": "ob1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "LD_LIBRARY_PATH": str(folder / "driver"),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_addresses_of_gpus_go_to_mpi_once_they_are_written(environment, ranks):
    mpirun = Path(environment["OPAL_PREFIX"], "bin/mpirun")
    command = [str(mpirun), "--oversubscribe", "-n", str(ranks), sys.executable]
    ended = launching.run([*command, str(JOB)], **environment)
    assert ended.returncode == 0, ended.stderr
    asked, tried, done = ended.stdout.splitlines()
    assert "is_aware=True" in asked
    assert tried == "tried: (True, 'tried on two ranks')"
    assert done == "done"


def test_a_library_without_cuda_crashes_in_a_trial_only(environment):
    """The MPI of these tests; the process that tries goes on."""
    script = (
        "from mpidist.device import probe; "
        "answer = probe.run(0); print('the answer is', *answer[:2])"
    )
    path = {"LD_LIBRARY_PATH": environment["LD_LIBRARY_PATH"]}
    ended = launching.run([sys.executable, "-c", script], **path)
    assert ended.returncode == 0, ended.stderr
    assert "the answer is False tried on one rank: it ended by SIG" in ended.stdout
