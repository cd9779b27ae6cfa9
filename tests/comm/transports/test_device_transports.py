"""Which transports of GPUs there are, and ranks of which one fails: without a GPU.

CuPy is replaced by as much of it as is called.
"""

import sys
import threading
import types
import warnings

import numpy as np
import pytest

import mpidist
from mpidist.comm.device_info import GpuFacts, Support, why_no_nccl
from mpidist.comm.transports import device, ipc
from mpidist.comm.transports.mpi import MpiTransport
from mpidist.comm.transports.nccl import NcclTransport, connect
from mpidist.comm.transports.selector import DeviceTransports, choose
from mpidist.device import kernels, streams
from mpidist.device.binding import GpuIdentity, nccl_version

GPU = GpuIdentity("node1", "0000:3b:00.0", "ab12", "H100", 13000)


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"CUDA says {status}")
        self.status = status


class NcclError(RuntimeError):
    """As CuPy's, of which pickle can make no other one."""

    def __init__(self, status):
        super().__init__(f"NCCL says {status}")
        self.status = status


class Communicator:
    """NCCL's: what the test tells it to do, and what was done with it."""

    fails_to_start = False

    def __init__(self, size, number, rank):
        if self.fails_to_start:
            raise NcclError(2)
        self.calls = []
        self.in_call = lambda: None
        self.async_error = None

    def abort(self):
        self.calls.append("abort")

    def destroy(self):
        self.calls.append("destroy")

    def allReduce(self, *arguments):
        assert "abort" not in self.calls, "there is no communicator any more"
        self.in_call()
        self.calls.append("allReduce")

    def check_async_error(self):
        assert "abort" not in self.calls, "there is no communicator any more"
        if self.async_error is not None:
            raise self.async_error


class Event:
    ptr = 0

    def __init__(self, **kwargs):
        pass

    def record(self, stream):
        pass


@pytest.fixture
def cupy(monkeypatch):
    """What of CuPy is called."""
    nccl = types.SimpleNamespace(
        NcclError=NcclError,
        NcclCommunicator=type("Communicator", (Communicator,), {}),
        get_unique_id=lambda: b"number",
    )
    not_ready = 600
    runtime = types.SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, eventQuery=lambda event: not_ready
    )
    stream = types.SimpleNamespace(ptr=0)
    cuda = types.SimpleNamespace(
        nccl=nccl, runtime=runtime, Event=Event, get_current_stream=lambda: stream
    )
    cupy = types.SimpleNamespace(cuda=cuda)
    for name, module in {"cupy": cupy, "cupy.cuda": cuda}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return cupy


def make_transports(consensus, is_aware=False):
    """Return the transports of ranks whose GPUs share no memory."""
    identities = tuple(GPU._replace(host=str(r)) for r in range(consensus.size))
    no_nccl = why_no_nccl([22703] * consensus.size, identities)
    gpus = GpuFacts(0, identities, False, Support(is_aware, "no"), 22703, no_nccl)
    by_mpi = MpiTransport(consensus)
    rows = {key: [(0, "mpi")] for key in ("allreduce", "allgatherv", "broadcast")}
    ordered = types.SimpleNamespace(name="ordered", device=False, is_ordered=True)
    host = choose({"mpi": by_mpi, "ordered": ordered}, ["ordered"], rows)
    return DeviceTransports(consensus, None, host, gpus, has_nccl=True)


def test_no_nccl_is_no_warning(monkeypatch, tmp_path):
    """CuPy's module is there, and warns when it is imported."""
    folder = tmp_path / "cupy" / "cuda"
    folder.mkdir(parents=True)
    (tmp_path / "cupy" / "__init__.py").touch()
    (folder / "__init__.py").touch()
    text = "import warnings; warnings.warn('nccl library could not be loaded')"
    (folder / "nccl.py").write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nccl_version() == 0
    assert "cupy.cuda.nccl" in sys.modules
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        del sys.modules[name]


def test_why_there_is_no_nccl():
    other = GPU._replace(pci_bus_id="0000:5e:00.0", uuid="cd34")
    mig = GPU._replace(name="H100 MIG 1g.10gb")  # an instance of a partitioned GPU
    part = mig._replace(uuid="ef56")  # another one
    named_alike = GPU._replace(uuid="ef56")  # of another node of the same name
    assert why_no_nccl([22703, 22703], [GPU, other]) == ""
    assert why_no_nccl([22703, 22703], [GPU, GPU._replace(host="node2")]) == ""
    assert why_no_nccl([22703, 22703], [GPU, named_alike]) == ""
    assert why_no_nccl([22703], [GPU]) == "there is one replica"
    assert "no NCCL on rank 1;" in why_no_nccl([22703, 0], [GPU, other])
    different = why_no_nccl([22703, 21805], [GPU, other])
    assert different == "the ranks have different versions of NCCL: [21805, 22703]"
    for pair in [GPU, GPU], [mig, part]:
        assert why_no_nccl([22703, 22703], pair).startswith("ranks share a GPU")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", ["nobody", "all", "first", "last"])
def test_nccl_that_cannot_start_is_missing(consensus, cupy, who):
    """On all ranks, with a reason: MPI can do without."""
    last = consensus.size - 1
    fails = {"nobody": (), "all": range(last + 1), "first": (0,), "last": (last,)}[who]
    Made = cupy.cuda.nccl.NcclCommunicator
    Made.fails_to_start = consensus.rank in fails
    made = []
    cupy.cuda.nccl.NcclCommunicator = lambda *args: made.append(Made(*args)) or made[0]
    transports = make_transports(consensus)
    assert ("nccl" in transports.by_name) is (who == "nobody")
    if fails:
        assert transports.missing["nccl"] == f"rank {fails[0]}: NCCL says 2"
        assert [comm.calls for comm in made] in ([], [["abort"]])
    transports.close()
    if not fails:
        assert made[0].calls == ["destroy"]


@pytest.mark.mpi(min_size=2)
def test_no_number_for_nccl_is_a_reason_on_all_ranks(consensus, cupy):
    def fail():
        raise NcclError(3)

    cupy.cuda.nccl.get_unique_id = fail
    assert connect(consensus) == (None, "rank 0: NCCL says 3")


def numbers():
    return types.SimpleNamespace(
        data=types.SimpleNamespace(ptr=0), size=3, dtype=np.dtype("f4")
    )


def test_a_death_does_not_take_nccl_from_a_call(consensus, cupy):
    """Another thread learns of it, and aborts the communicator."""
    transport = NcclTransport(consensus, Communicator(1, b"", 0))
    communicator = transport._comm
    lock, asks = transport._lock, threading.Event()

    class Lock:
        __enter__, __exit__ = lock.__enter__, lock.__exit__
        release = lock.release

        def acquire(self, timeout):
            asks.set()
            return lock.acquire(timeout=timeout)

    transport._lock = Lock()
    aborting = threading.Thread(target=transport._abort)

    def in_call():
        aborting.start()
        assert asks.wait(60)

    communicator.in_call = in_call
    transport.allreduce([numbers()], numbers(), None)
    aborting.join()
    assert communicator.calls == ["allReduce", "abort"]


def test_after_a_death_nccl_is_not_called(consensus, cupy, monkeypatch):
    transport = NcclTransport(consensus, Communicator(1, b"", 0))
    monkeypatch.setattr(consensus.failures, "ranks", (1,))
    transport._abort()
    with pytest.raises(mpidist.RankLostError, match="rank 1 "):
        transport.allreduce([numbers()], numbers(), None)
    assert transport._comm.calls == ["abort"]


@pytest.mark.parametrize("dies", [False, True])
def test_an_error_of_nccl_may_be_a_death(consensus, cupy, monkeypatch, dies):
    """Which MPI may hear of later."""
    transport = NcclTransport(consensus, Communicator(1, b"", 0))
    transport._comm.async_error = NcclError(6)
    losses = consensus.failures
    monkeypatch.setattr(losses, "is_needed", True)

    def wait_for_names():
        losses.ranks = (1,) if dies else ()

    monkeypatch.setattr(losses, "wait_for_names", wait_for_names)
    expected = mpidist.RankLostError if dies else NcclError
    with pytest.raises(expected, match="rank 1 " if dies else "NCCL says 6"):
        transport.allreduce([numbers()], numbers(), deadline=1e18)
    losses.ranks = ()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("who", ["nobody", "last"])
def test_kernels_that_one_rank_cannot_compile_are_missing(
    consensus, cupy, monkeypatch, who
):
    """Not found out in the middle of a reduction, where the others wait."""
    last = consensus.size - 1

    def load():
        if who == "last" and consensus.rank == last:
            raise OSError("no space")

    monkeypatch.setattr(kernels, "load", load)
    monkeypatch.setattr(device, "DeviceBuffer", lambda size: None)
    transports = make_transports(consensus, is_aware=True)
    assert ("device" in transports.by_name) is (who == "nobody")
    is_direct = isinstance(transports.by_name["mpi"], device.DeviceMpiTransport)
    assert is_direct is (who == "nobody")
    if who == "last":
        assert transports.missing["device"] == f"rank {last}: no space"
    transports.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("error", [OSError("no space"), RuntimeError("no NVRTC")])
def test_memory_that_one_gpu_cannot_share_is_missing(
    consensus, cupy, monkeypatch, error
):
    """Whatever the reason: kernels are compiled, and kept on a disk."""

    def load():
        if consensus.rank == consensus.size - 1:
            raise error

    monkeypatch.setattr(kernels, "load", load)
    array = np.zeros(64, "u1")
    own = types.SimpleNamespace(array=OnGpu(array))
    monkeypatch.setattr(ipc, "DeviceBuffer", lambda size: own)
    cupy.cuda.runtime.deviceSynchronize = lambda: None
    cupy.cuda.runtime.ipcGetMemHandle = lambda address: b"handle"
    reason = f"rank {consensus.size - 1}: {error}"
    assert ipc.share_buffers(consensus, 64) == (None, reason)


class OnGpu:
    """Bytes that are thought to be on a GPU."""

    device = types.SimpleNamespace(id=0)
    data = types.SimpleNamespace(ptr=0)

    def __init__(self, array):
        self.array = array
        self.size = array.size

    def __getitem__(self, piece):
        return self.array[piece]


@pytest.mark.mpi(min_size=2)
def test_memory_that_one_rank_cannot_unmap_is_an_error_on_all(
    consensus, cupy, monkeypatch
):
    """At the end, when the others have unmapped theirs: its GPU is broken."""
    last, closed = consensus.size - 1, []

    def close(address):
        if consensus.rank == last:
            raise CUDARuntimeError(700)
        closed.append(address)

    cupy.cuda.runtime.ipcCloseMemHandle = close
    cupy.cuda.UnownedMemory = cupy.cuda.MemoryPointer = lambda *args: args
    cupy.ndarray = lambda shape, dtype, memptr: np.zeros(shape, dtype)
    own = types.SimpleNamespace(array=OnGpu(np.zeros(64, "u1")))
    others = {r: 100 + r for r in range(consensus.size) if r != consensus.rank}
    buffers = ipc.IpcBuffers(consensus, own, dict(others))
    transports = make_transports(consensus)
    transports._ipc = buffers
    with pytest.raises(mpidist.CollectiveError, match=f"rank {last}: CUDA says 700"):
        transports.close()
    assert closed == ([] if consensus.rank == last else list(others.values()))


@pytest.mark.parametrize("frees", [False, True])
def test_memory_that_cupy_keeps_is_given_back(cupy, frees):
    """Its pool holds what arrays have freed, of which plain memory knows nothing."""
    held = [True]

    class Memory:
        def __init__(self, size):
            if held[0]:
                raise CUDARuntimeError(streams.ERROR_MEMORY_ALLOCATION)
            self.size = size

    def free_all_blocks():
        held[0] = not frees

    cupy.cuda.Memory = Memory
    cupy.get_default_memory_pool = lambda: types.SimpleNamespace(
        free_all_blocks=free_all_blocks
    )
    if frees:
        assert streams._allocate(1000).size == 1000
    else:
        with pytest.raises(CUDARuntimeError, match="CUDA says 2"):
            streams._allocate(1000)
