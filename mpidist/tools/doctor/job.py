"""The ranks of the doctor's job, who tell each other things, each with a deadline."""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.agreement import Agreement
from mpidist.comm.topology import Topology
from mpidist.comm.transports.tuning_table import short_name
from mpidist.errors import LaunchError
from mpidist.launch.launchers import check_launch
from mpidist.tools.doctor.launch_checks import LaunchFacts, find_launched

__all__ = ["Job"]


class Job:
    """All ranks of COMM_WORLD. Collective to make.

    Args:
      seconds: for the making.

    Raises:
      DeadlineError: on ranks that waited longer.
    """

    def __init__(self, seconds: float):
        waiting = Agreement(MPI.COMM_WORLD)
        comm, request = MPI.COMM_WORLD.Idup()
        waiting.wait(request, time.monotonic() + seconds, "starting")
        waiting.close()
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._agreement = Agreement(self.comm)
        self.local_rank, self._node = self._find_node()

    def find_launch(self, environ: Mapping[str, str]) -> LaunchFacts:
        """Return what MPI says.

        Args:
          environ: the environment before MPI started.
        """
        error = ""
        library = MPI.Get_library_version()
        try:
            check_launch(environ, MPI.COMM_WORLD.Get_size(), library)
        except LaunchError as caught:
            error = str(caught)
        launched = find_launched(environ)
        return LaunchFacts(
            self.size,
            MPI.Get_processor_name(),
            self._node,
            " ".join(short_name(library).split()),
            ".".join(map(str, MPI.Get_version())),
            (
                MPI.THREAD_SINGLE,
                MPI.THREAD_FUNNELED,
                MPI.THREAD_SERIALIZED,
                MPI.THREAD_MULTIPLE,
            ).index(MPI.Query_thread()),
            launched[0] if launched else None,
            error,
            environ.get("MPIDIST_ALLOW_SINGLETON") == "1",
            environ.get("MPIDIST_RANKS_PER_NODE", ""),
        )

    def _find_node(self) -> tuple[int, int]:
        """Return this rank on its node, and the node's lowest, as strategies see it."""
        try:
            topology = Topology.create(self.comm)
        except LaunchError:  # on all ranks: what pretends nodes is no number
            return self.rank, 0
        try:
            return topology.local_rank, int(topology.node.bcast(self.rank))
        finally:
            topology.close()

    def gather(self, what: str, value: Any, seconds: float) -> list[Any]:
        """Return the values of all ranks on rank 0, and nothing elsewhere. Collective.

        Raises:
          DeadlineError: on ranks that waited longer; names those that are missing.
        """
        deadline = time.monotonic() + seconds
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        request = self.comm.Iallgather(np.array([data.size]), sizes)
        self._agreement.wait(request, deadline, what)
        everything, receive = np.empty(int(sizes.sum()), np.uint8), None
        if self.rank == 0:
            receive = [everything, sizes]
        request = self.comm.Igatherv(data, receive)
        self._agreement.wait(request, deadline, what)
        if self.rank:
            return []
        ends = np.cumsum(sizes)
        return [pickle.loads(everything[e - n : e].data) for n, e in zip(sizes, ends)]

    def share(self, what: str, value: Any, seconds: float) -> Any:
        """Return rank 0's value. Collective.

        Raises:
          DeadlineError: see `gather`.
        """
        deadline = time.monotonic() + seconds
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        size = np.array([data.size])
        self._agreement.wait(self.comm.Ibcast(size), deadline, what)
        if self.rank:
            data = np.empty(int(size[0]), np.uint8)
        self._agreement.wait(self.comm.Ibcast(data), deadline, what)
        return pickle.loads(data.data)

    def close(self) -> None:
        """End MPI. Collective."""
        self._agreement.close()
        self.comm.Free()
        MPI.Finalize()
