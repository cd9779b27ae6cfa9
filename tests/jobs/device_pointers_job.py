"""A job on ranks whose MPI takes addresses of GPUs: mpidist's calls of MPI on them.

The GPU may be one whose memory exists, but that computes nothing. What is written to an
array gets there when the stream is waited for, and no sooner.
"""

import sys
import time

import numpy as np
from mpi4py import MPI

from mpidist.comm import device_info
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.transports import device
from mpidist.comm.transports.device import DeviceMpiTransport, DeviceTransport
from mpidist.device import arrays, probe


class LateArray:
    """What MPI transports need of an array on a GPU; views share its memory."""

    def __init__(self, values, base=None, start=0):
        self.values = values  # until the stream is waited for; then on the GPU
        self.base = base or probe.DeviceArray(np.full_like(values, 77))
        self.start = start
        self.pending = base is None
        self.parent = None
        self.dtype, self.shape, self.size = values.dtype, values.shape, values.size
        self.nbytes, self.ndim = values.nbytes, values.ndim

    @property
    def __cuda_array_interface__(self):
        interface = self.base.__cuda_array_interface__
        address = interface["data"][0] + self.start
        shape, kind = self.shape, self.dtype.str
        return {**interface, "shape": shape, "typestr": kind, "data": (address, False)}

    def reshape(self, *_):
        return self._view(self.values.reshape(-1), 0)

    def view(self, dtype):
        return self._view(self.values.view(dtype), 0)

    def __getitem__(self, piece):
        start, _, _ = piece.indices(self.size)
        return self._view(self.values[piece], start * self.dtype.itemsize)

    def _view(self, values, start):
        view = LateArray(values, self.base, self.start + start)
        view.parent = self
        return view

    def land(self):
        array = self
        while array.parent is not None:
            array = array.parent
        if array.pending:
            array.base.set(array.values)
            array.pending = False

    def get(self):
        return self.base.get()


def main():
    probe.use_gpu(0)
    arrays.synchronize = LateArray.land
    comm = MPI.COMM_WORLD
    rank, size = comm.rank, comm.size
    consensus = Consensus(comm)
    device.DeviceBuffer = lambda size: None  # CuPy's; nothing is added up here
    transport = DeviceMpiTransport(consensus, DeviceTransport(consensus))
    for count in (1, 1000, 300_000):
        everyone = [np.arange(count, dtype="f8") * (r + 1) for r in range(size)]
        send, receive = LateArray(everyone[rank]), LateArray(np.zeros(count))
        transport.allreduce([send], receive, None)
        assert np.array_equal(receive.get(), np.sum(everyone, axis=0)), "sum"
        for deadline in (None, time.monotonic() + 60):
            counts = [-(-count // (r + 1)) for r in range(size)]
            send = LateArray(everyone[rank][: counts[rank]].copy())
            receive = LateArray(np.zeros(sum(counts)))
            transport.allgatherv(send, receive, counts, deadline)
            parts = [e[:n] for e, n in zip(everyone, counts, strict=True)]
            assert np.array_equal(receive.get(), np.concatenate(parts)), "gather"
            buffer = LateArray(everyone[rank].copy())
            transport.broadcast(buffer, size - 1, deadline)
            assert np.array_equal(buffer.get(), everyone[-1]), "broadcast"
    library = MPI.Get_library_version().partition("\n")[0]
    answer = device_info.ask(library, {})
    if rank == 0:
        print("asked:", answer)
        print("tried:", probe.run(0)[:2])
        print("done", flush=True)
    comm.Barrier()
    consensus.close()


if __name__ == "__main__":
    main()
    sys.exit(0)
