"""Whether MPI takes addresses of GPUs: asked, tried elsewhere, kept, overridden."""

import json
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
from mpi4py import MPI

import mpidist
from mpidist.comm import device_info
from mpidist.comm.device_info import Support, ask, cache_path, find_support
from mpidist.device import binding, probe
from mpidist.device.binding import (
    GpuIdentity,
    gpu_count,
    require_own_gpus,
    shared_gpus,
)
from mpidist.tools.doctor import checks

MPIRUN = Path(sys.executable).with_name("mpirun")
GOOD_END = f"print({probe._DONE!r})"
GPU = GpuIdentity("node1", "0000:3b:00.0", "ab12", "H100", 13000)


@pytest.fixture
def cache(comm, tmp_path_factory, monkeypatch):
    """The file of outcomes, the same for all ranks, in a folder that is not there."""
    monkeypatch.delenv("MPIDIST_CUDA_AWARE", raising=False)
    folder = tmp_path_factory.mktemp("cache") / "new" if comm.rank == 0 else None
    monkeypatch.setenv("XDG_CACHE_HOME", str(comm.bcast(folder)))
    return cache_path()


@pytest.fixture
def tried(monkeypatch):
    """Stands for a trial, which needs a GPU; a list of its calls."""
    calls = []

    def run(index):
        calls.append(index)
        return probe.Outcome(True, "tried on two ranks", True)

    monkeypatch.setattr(probe, "run", run)
    return calls


@pytest.mark.parametrize(
    ("library", "environ", "expected"),
    [
        ("CRAY MPICH version 8.1", {}, False),
        ("CRAY MPICH version 8.1", {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True),
        ("Intel(R) MPI Library 2021.18", {}, False),
        ("Intel(R) MPI Library 2021.18", {"I_MPI_OFFLOAD": "0"}, False),
        ("Intel(R) MPI Library 2021.18", {"I_MPI_OFFLOAD": "1"}, True),
    ],
)
def test_vendors_variables_say_it(library, environ, expected):
    answer = ask(library, environ)
    assert answer.is_aware is expected
    name = next(iter(environ), None)
    assert name is None or f"{name}={environ[name]}" in answer.why


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("", False),
        ("system, mpi", False),
        ("system,cuda", True),
        ("system, cuda:device", True),
        ("cuda:host:device", True),
        ("cuda:host", False),
        ("system,cuda:host,cuda:managed,rocm:device", False),
        ("cuda:host,cuda:device", True),
    ],
)
def test_kinds_of_memory_say_it(kinds, expected):
    """MPI-4.1, section 12.4.3: memory of CUDA may be that of the host alone."""
    assert device_info._has_device_memory(kinds) is expected


def test_this_library_says_it_of_itself():
    """The wheels are built without CUDA, and one of the queries is in each."""
    library = MPI.Get_library_version().partition("\n")[0]
    answer = ask(library, {})
    assert answer is None or isinstance(answer, Support)
    if library.startswith("Intel"):
        assert not answer.is_aware
    elif answer is not None:
        assert "MPIX_" in answer.why


def test_unknown_is_tried_once_and_kept(comm, consensus, cache, tried, monkeypatch):
    monkeypatch.setattr(device_info, "ask", lambda *_: None)
    for attempt in range(2):
        support = find_support(consensus, None, GPU, index=5)
        assert support.is_aware
        assert support.why.startswith("tried on two ranks")
        assert (str(cache) in support.why) == (attempt == 1)
    assert tried == ([5] if comm.rank == 0 else [])
    ((key, (is_aware, _)),) = json.loads(cache.read_text()).items()
    assert key.endswith("| CUDA 13000 | H100")
    assert is_aware


@pytest.mark.parametrize("is_certain", [False, True])
def test_only_what_is_certain_is_kept(consensus, cache, monkeypatch, is_certain):
    """A machine that was busy must not count as one without CUDA for ever."""
    outcome = probe.Outcome(False, "no end after 60 s", is_certain)
    monkeypatch.setattr(probe, "run", lambda index: outcome)
    monkeypatch.setattr(device_info, "ask", lambda *_: None)
    support = find_support(consensus, None, GPU, index=0)
    assert support == Support(False, "no end after 60 s")
    consensus.comm.Barrier()
    assert cache.exists() is is_certain


@pytest.mark.mpi(min_size=2)
def test_a_library_that_cannot_be_asked_on_one_rank_is_an_error_on_all(
    consensus, cache, monkeypatch
):
    def ask(*_):
        if consensus.rank == consensus.size - 1:
            raise OSError("the reason")

    monkeypatch.setattr(device_info, "ask", ask)
    with pytest.raises(OSError, match="the reason"):
        find_support(consensus, None, GPU, index=0)


def test_each_model_of_gpu_is_tried(comm, consensus, cache, tried, monkeypatch):
    monkeypatch.setattr(device_info, "ask", lambda *_: Support(True, "it says so"))
    gpu = GPU._replace(name=f"model {comm.rank}")
    assert find_support(consensus, None, gpu, index=0).is_aware
    assert tried == [0]


def test_one_rank_that_cannot_is_enough(comm, consensus, cache, tried, monkeypatch):
    last = comm.rank == comm.size - 1
    answer = Support(not last, "no" if last else "yes")
    monkeypatch.setattr(device_info, "ask", lambda *_: answer)
    assert find_support(consensus, None, GPU, index=0) == Support(False, "no")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": [1, 2, 3]}', "\0"])
def test_a_broken_file_is_written_anew(consensus, cache, tried, monkeypatch, text):
    monkeypatch.setattr(device_info, "ask", lambda *_: None)
    if consensus.rank == 0:
        cache.parent.mkdir(parents=True)
        cache.write_text(text)
    consensus.comm.Barrier()
    assert find_support(consensus, None, GPU, index=0).is_aware
    consensus.comm.Barrier()
    assert len(json.loads(cache.read_text())) == 1


def test_a_folder_that_cannot_be_written_is_no_error(
    consensus, cache, tried, monkeypatch
):
    monkeypatch.setattr(device_info, "ask", lambda *_: None)
    if consensus.rank == 0:
        cache.parent.parent.write_text("a file where the folder would be")
    consensus.comm.Barrier()
    assert find_support(consensus, None, GPU, index=0).is_aware


@pytest.mark.parametrize(
    ("answer", "option", "expected"),
    [
        # A trial may be what the user wants to avoid
        (None, True, Support(True, "cuda_aware=True, where nothing else is known")),
        (Support(False, "it says no"), None, Support(False, "it says no")),
    ],
)
def test_what_is_not_tried(
    consensus, cache, tried, monkeypatch, answer, option, expected
):
    monkeypatch.setattr(device_info, "ask", lambda *_: answer)
    assert find_support(consensus, option, GPU, index=0) == expected
    assert not tried


@pytest.mark.parametrize("asked_for", [False, True])
@pytest.mark.parametrize("by", ["option", "variable"])
def test_an_override_says_what_it_overrode(
    consensus, cache, tried, monkeypatch, asked_for, by
):
    monkeypatch.setattr(device_info, "ask", lambda *_: Support(False, "it says no"))
    option = asked_for if by == "option" else None
    if by == "variable":
        monkeypatch.setenv("MPIDIST_CUDA_AWARE", str(int(asked_for)))
    support = find_support(consensus, option, GPU, index=0)
    assert support.is_aware is asked_for
    name = "cuda_aware" if by == "option" else "MPIDIST_CUDA_AWARE"
    assert support.why.startswith(f"{name}=")
    assert support.why.endswith("where otherwise it is not: it says no")


@pytest.mark.mpi(min_size=2)
def test_unlike_variables_are_an_error_on_all_ranks(consensus, cache, monkeypatch):
    if consensus.rank == 0:
        monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    with pytest.raises(mpidist.LaunchError, match="differs between ranks"):
        find_support(consensus, None, GPU, index=0)


def test_a_crash_is_an_answer(monkeypatch):
    """What a library does that reads a GPU's address on the host."""
    crash = "import ctypes; ctypes.string_at(0)"
    environ = probe._clean(os.environ)
    assert "SIGSEGV" in probe._run_one([sys.executable, "-c", crash], environ)


def test_a_crash_of_ranks_that_mpirun_has_started_is_kept(monkeypatch):
    monkeypatch.setattr(probe, "library_path", lambda: MPIRUN.parents[1] / "lib/mpi.so")
    crash = (
        "import ctypes, mpi4py.MPI as M; M.COMM_WORLD.size < 2 or ctypes.string_at(0)"
    )
    monkeypatch.setattr(
        probe, "python_child", lambda *_: [sys.executable, "-c", f"{crash}; {GOOD_END}"]
    )
    outcome = probe.run(0)
    assert outcome.why.endswith("on two ranks: it ended by SIGSEGV")
    assert (outcome.is_aware, outcome.is_certain) == (False, True)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_what_another_ended_may_succeed_next_time(monkeypatch, name):
    code = f"import os, signal; os.kill(os.getpid(), signal.{name})"
    command = [sys.executable, "-c", code]
    monkeypatch.setattr(probe, "python_child", lambda *_: command)
    assert probe.run(0) == (False, f"tried on one rank: it ended by {name}", False)


def test_other_ways_of_the_library_are_tried_again(
    comm, consensus, cache, tried, monkeypatch
):
    monkeypatch.setattr(device_info, "ask", lambda *_: None)
    for ways in {}, {"UCX_TLS": "tcp"}, {"UCX_TLS": "tcp", "OMPI_MCA_pml": "ob1"}:
        for name, value in ways.items():
            monkeypatch.setenv(name, value)
        for _ in range(2):
            find_support(consensus, None, GPU, index=0)
    assert len(tried) == (3 if comm.rank == 0 else 0)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise AssertionError('Allreduce')", "AssertionError: Allreduce"),
        ("print('something')", "it ended with 0: nothing on stderr"),
        (f"print({probe._DONE!r})", ""),
        (f"print({probe._DONE!r}); raise SystemExit(3)", "it ended with 3"),
    ],
)
def test_only_a_good_end_is_a_good_answer(code, expected):
    environ = probe._clean(os.environ)
    assert expected in probe._run_one([sys.executable, "-c", code], environ)


def test_no_end_is_an_answer(monkeypatch):
    monkeypatch.setattr(probe, "_SECONDS", 0.5)
    endless = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    assert "no end after 0.5 s" in probe._run_one(endless, os.environ)


def test_a_trial_is_no_part_of_this_job():
    environ = {
        "OMPI_COMM_WORLD_RANK": "1",
        "PMI_FD": "5",
        "PMIX_RANK": "1",
        "SLURM_PROCID": "3",
        "MPI_LOCALRANKID": "0",
        "OMPI_MCA_pml": "ucx",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PATH": "/bin",
    }
    clean = probe._clean(environ)
    kept = {name: clean[name] for name in environ if name in clean}
    assert kept == {
        "OMPI_MCA_pml": "ucx",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "PATH": "/bin",
    }


@pytest.mark.gpu
def test_a_trial_tells_what_this_library_can(comm):
    """It ends well, or it crashed; either way this process goes on."""
    if not gpu_count():
        pytest.skip("needs a GPU and CuPy")
    is_aware, why, _ = probe.run(0)
    assert "tried" in why
    answer = ask(MPI.Get_library_version(), os.environ)
    if is_aware:
        assert answer is None or answer.is_aware


def test_gpus_are_told_apart():
    other = GPU._replace(pci_bus_id="0000:5e:00.0", uuid="cd34")
    same_on_other_host = GPU._replace(host="node2")
    part = GPU._replace(uuid="ef56")  # another instance of a partitioned GPU
    assert shared_gpus([GPU, other, same_on_other_host, part, None, None]) == []
    assert shared_gpus([GPU, other, GPU, other, GPU]) == [[0, 2, 4], [1, 3]]
    require_own_gpus([GPU, other])
    with pytest.raises(mpidist.LaunchError, match=r"ranks 0, 2 would .*3b:00\.0 \(H1"):
        require_own_gpus([GPU, other, GPU])


def test_cupy_is_not_imported_where_there_is_no_driver(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(binding.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(binding, "_DRIVER", "libmissing.so.1")
    assert binding.gpu_count() == 0
    assert "cupy" not in sys.modules


@pytest.mark.parametrize(
    ("status", "visible", "is_said"),
    [
        (35, "", True),  # the driver is too old
        (802, "0", True),  # the fabric manager does not run
        (100, "", False),  # there is no GPU
        (100, "-1", False),
        (100, "7", True),  # not the one that was asked for
    ],
)
def test_an_error_of_cuda_is_said_once(monkeypatch, status, visible, is_said):
    """The job computes on the CPU then."""

    class CUDARuntimeError(RuntimeError):
        def __init__(self):
            super().__init__(f"cudaErrorOfNumber{status}")
            self.status = status

    def count():
        raise CUDARuntimeError

    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, getDeviceCount=count)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime), __spec__=True)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(binding, "cuda_errors", [])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [binding.gpu_count(), binding.gpu_count()] == [0, 0]
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == is_said
    assert all(f"CUDA fails: cudaErrorOfNumber{status}" in text for text in texts)
    if is_said:
        (row,) = checks.check_gpus()
        assert row.status is checks.WARN
        assert f"cudaErrorOfNumber{status}" in row.found


@pytest.mark.parametrize("optimize", ["", "1"])
def test_wrong_numbers_are_an_answer_without_asserts_too(optimize):
    """`python -O` removes assertions."""
    code = """
import numpy as np
from mpidist.device import probe
class Zeros(np.ndarray):
    def __new__(cls, values):
        return values.copy().view(cls)
    def get(self):
        return np.zeros_like(self)
    def set(self, values):
        self[:] = values
probe.use_gpu, probe.DeviceArray = lambda index: None, Zeros
probe._main(0)
"""
    ended = launching.run([sys.executable, "-c", code], PYTHONOPTIMIZE=optimize)
    assert ended.stderr.endswith("RuntimeError: Allreduce gives wrong numbers\n")
    assert ended.returncode == 1
