"""On which GPUs a process makes CUDA contexts, and when."""

import pytest

from mpidist.device.binding import gpu_count
from mpidist.launch import mpi_defaults

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not gpu_count(), reason="needs a GPU and CuPy")
MVAPICH = "MVAPICH2-GDR Version  : 2.3.7"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.28.15 (ANL base 3.4a2)"

FIRST = """
import ctypes, os

def contexts():
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    assert driver.cuInit(0) == 0
    assert driver.cuDeviceGetCount(ctypes.byref(found)) == 0
    flags, active = ctypes.c_uint(), ctypes.c_int()
    made = []
    for device in range(found.value):
        state = ctypes.byref(flags), ctypes.byref(active)
        assert driver.cuDevicePrimaryCtxGetState(device, *state) == 0
        made += [device] * active.value
    return made
"""

ON_CPUS = """
import numpy as np
import mpidist
from mpidist.device.binding import current_gpu, gpu_count

assert contexts() == [], ("import", contexts())
strategy = mpidist.MirroredStrategy(devices=["CPU:0"])
total = strategy.reduce("SUM", np.ones(3))
assert total.tolist() == [strategy.num_replicas_in_sync] * 3
assert gpu_count() and current_gpu() is None  # CuPy is imported
strategy.experimental_finalize()
assert contexts() == [], ("a strategy of CPUs", contexts())
print("passed")
"""

ON_GPUS = """
import numpy as np
import mpidist
from mpi4py import MPI
from mpidist.device.binding import gpu_count

local, count = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).rank, gpu_count()
assert contexts() == [], ("import", contexts())
devices = [f"GPU:{(count - 1 - rank) % count}" for rank in range(MPI.COMM_WORLD.size)]
own = (count - 1 - local if GIVEN else local) % count
strategy = mpidist.MirroredStrategy(
    devices=devices if GIVEN else None, allow_shared_gpu=True
)
assert contexts() == [own], ("a strategy", contexts())

import cupy

size = strategy.num_replicas_in_sync
total = strategy.reduce("SUM", {"a": cupy.ones(100_000), "b": cupy.ones(3)})
assert total["b"].tolist() == [size] * 3
assert total["a"].device.id == own
with strategy.scope():
    variable = mpidist.Variable(
        np.ones(3, "f4"), aggregation=mpidist.VariableAggregation.SUM
    )
rows = mpidist.Dataset.from_tensor_slices(np.ones((8 * size, 3), "f4"))
for batch in strategy.experimental_distribute_dataset(rows.batch(2 * size)):
    strategy.run(lambda x: variable.assign_add(x.sum(0)), args=(batch,))
strategy.experimental_finalize()
assert contexts() == [own], ("its work", contexts())
print("passed")
"""

ASKED = """
from mpidist.launch import mpi_defaults  # initializes MPI
from mpidist.device.binding import gpu_count
from mpi4py import MPI

local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).rank
expected = [local % gpu_count()] if IS_BOUND else []
assert contexts() == expected, contexts()
device = ctypes.c_int(-1)
status = ctypes.CDLL("libcuda.so.1").cuCtxGetDevice(ctypes.byref(device))
assert (status == 0) == IS_BOUND
assert device.value == (expected[0] if IS_BOUND else -1)
print("passed")
"""


def require_passes(ended, ranks):
    assert ended.stdout.count("passed") == ranks


@gpu
@needs_gpu
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_job_on_cpus_makes_no_context(mpirun, ranks):
    require_passes(mpirun(ranks, FIRST + ON_CPUS), ranks)


@gpu
@needs_gpu
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("given", [False, True])
def test_a_rank_makes_one_context_on_its_gpu(mpirun, ranks, given):
    script = f"GIVEN = {given}\n{FIRST}{ON_GPUS}"
    require_passes(mpirun(ranks, script, CUDA_EMULATOR_DEVICES="3"), ranks)


@gpu
@needs_gpu
@pytest.mark.parametrize(
    ("first", "environ", "is_bound"),
    [
        ("", {}, False),
        ("", {"MPIDIST_BIND_GPU": "1"}, True),
        ("from mpi4py import MPI", {"MPIDIST_BIND_GPU": "1"}, False),  # too late
    ],
    ids=["not asked", "asked", "MPI runs"],
)
def test_a_gpu_is_bound_before_mpi_starts(mpirun, first, environ, is_bound):
    """By MPICH's and Open MPI's variables, if that is asked for."""
    script = f"{first}\nIS_BOUND = {is_bound}\n{FIRST}{ASKED}"
    require_passes(mpirun(2, script, CUDA_EMULATOR_DEVICES="3", **environ), 2)


@gpu
@needs_gpu
@pytest.mark.parametrize("library", [MVAPICH, CRAY])
def test_libraries_that_use_the_current_gpu(mpirun, library):
    script = f"""{FIRST}
from mpidist.launch.mpi_defaults import choose_early
environ = {{"MPICH_GPU_SUPPORT_ENABLED": "1", "SLURM_LOCALID": "4"}}
device = choose_early(environ, {library!r})
assert contexts() == [device], (device, contexts())
print("passed")
"""
    require_passes(mpirun(1, script, CUDA_EMULATOR_DEVICES="3"), 1)


@pytest.mark.parametrize(
    ("library", "environ", "expected"),
    [
        (MVAPICH, {}, True),
        ("MVAPICH-Plus Version: 4.0", {}, True),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        (CRAY, {}, False),
        ("Open MPI v5.0.11, package", {}, False),
        ("MPICH Version:      4.3.2", {}, False),
        ("Intel(R) MPI Library 2021.16", {}, False),
        ("Intel(R) MPI Library 2021.16", {"MPIDIST_BIND_GPU": "1"}, True),
        (MVAPICH, {"MPIDIST_BIND_GPU": "0"}, False),
    ],
)
def test_which_libraries_use_the_current_gpu(library, environ, expected):
    assert mpi_defaults._is_gpu_wanted(environ, library) == expected


def test_a_driver_that_is_not_there_is_no_error(monkeypatch):
    monkeypatch.setattr(mpi_defaults, "_DRIVER", "libnot-there.so")
    monkeypatch.setattr(mpi_defaults.importlib.util, "find_spec", lambda name: name)
    assert mpi_defaults.choose_early({"SLURM_LOCALID": "0"}, MVAPICH) is None
