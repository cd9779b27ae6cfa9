"""Topology: duplicated communicators, ranks on a node, and this rank's device."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import NoReturn, cast

from mpi4py import MPI

from mpidist import _version
from mpidist.comm.consensus.consensus import FINALIZED
from mpidist.comm.consensus.failures import FailureDetector, can_survive
from mpidist.comm.consensus.pending import Pending, gather_likely_equal, highest
from mpidist.comm.consensus.process_monitor import monitor_processes
from mpidist.comm.consensus.signatures import group_by_rank
from mpidist.device.binding import gpu_count, use_gpu
from mpidist.errors import ArgumentError, ArgumentTypeError, ContextError, LaunchError
from mpidist.launch.launchers import check_launch
from mpidist.util import validation
from mpidist.util.available_memory import available_cores
from mpidist.util.forks import FORKED, is_forked
from mpidist.util.settings import RANKS_PER_NODE

# "GPU:0", "/gpu:0", "/device:GPU:0", "/job:worker/replica:0/task:0/device:GPU:0"
_DEVICE = re.compile(
    r"(?:/(?:(?:job:[^/]+|replica:\d+|task:\d+)/)*)?(?:device:)?"
    r"(?P<kind>CPU|GPU):(?P<index>\d{1,9})",
    re.I,
)
_THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "MPI_THREAD_SINGLE",
    MPI.THREAD_FUNNELED: "MPI_THREAD_FUNNELED",
    MPI.THREAD_SERIALIZED: "MPI_THREAD_SERIALIZED",
    MPI.THREAD_MULTIPLE: "MPI_THREAD_MULTIPLE",
}


@functools.cache  # MPI no longer says it once it was finalized
def job_size() -> int:
    """Return how many ranks the job has."""
    return MPI.COMM_WORLD.Get_size()


def parse_devices(devices: Sequence[str]) -> list[tuple[str, int]]:
    """Return the kind, CPU or GPU, and the index that each device string names.

    Raises:
      ArgumentError: no devices, or a string that is not like "GPU:0".
      ArgumentTypeError: not a sequence of strings.
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise ArgumentTypeError(
            "devices must be a list of strings like 'GPU:0', not "
            f"{validation.shown(devices)}"
        )
    if not devices:
        raise ArgumentError(
            "devices must name at least one device, not []; omit it to use this "
            "rank's GPU, or the CPU"
        )
    parsed = []
    for device in devices:
        match = _DEVICE.fullmatch(device) if isinstance(device, str) else None
        if match is None:
            raise ArgumentError(
                "devices must hold strings like 'GPU:0' or 'CPU:0', not "
                f"{validation.shown(device)}"
            )
        parsed.append((match["kind"].upper(), int(match["index"])))
    if len(parsed) > 1 and len(set(parsed)) < len(parsed):
        raise ArgumentError(
            f"devices must not name a device twice: {validation.shown(list(devices))}"
        )
    return parsed


def _compare_starts(environ: Mapping[str, str], comm: MPI.Intracomm) -> int | None:
    """Return the maximum number of ranks that count as one node; None for no limit.

    That is for tests: it treats one machine as several nodes. This is the first
    exchange of a strategy, whose form must not change: ranks with different versions
    can do nothing else together. Collective.
    """
    asked = RANKS_PER_NODE.text(environ)
    number = RANKS_PER_NODE.read_or_default(environ)
    own = _version.__version__, MPI.Query_thread(), can_survive(), asked
    everyone = gather_likely_equal(comm, own)
    is_good = asked is None or number is not None
    if not is_good or everyone.count(own) < len(everyone):
        _refuse_unlike(everyone)
    return number


def _refuse_unlike(everyone: Sequence[tuple[str, int, bool, str | None]]) -> NoReturn:
    """Raise an error on what ranks start with, if that differs or cannot be used."""
    versions, threads, survives, asked = zip(*everyone, strict=True)
    if len(set(versions)) > 1:
        raise LaunchError(
            f"the version of mpidist differs between ranks: {group_by_rank(versions)}; "
            "start all ranks with one Python of one environment, on every node"
        )
    if len(set(threads)) > 1:
        levels = group_by_rank([_THREAD_LEVELS.get(n, str(n)) for n in threads])
        raise LaunchError(
            f"the level of threads in MPI differs between ranks: {levels}; set "
            "MPI4PY_RC_THREAD_LEVEL and mpi4py.rc alike on all ranks"
        )
    if len(set(survives)) > 1:
        raise LaunchError(
            "whether MPI continues without dead ranks (OMPI_MCA_mpi_ft_enable) differs "
            f"between ranks: {group_by_rank(list(map(str, survives)))}"
        )
    texts = ["not set" if t is None else validation.shown(t) for t in asked]
    raise LaunchError(
        f"{RANKS_PER_NODE.name} must be a positive number, the same on all ranks; it "
        f"is {group_by_rank(texts)}"
    )


def _ranks_that_share_memory(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a new communicator of this rank's node. Collective.

    Connected or spawned jobs may be on one node, but MPICH cannot allocate memory for
    ranks of several jobs. So each job counts as a separate node.
    """
    node = cast(MPI.Intracomm, comm.Split_type(MPI.COMM_TYPE_SHARED))
    ranks = node.group.Translate_ranks(None, MPI.COMM_WORLD.group)
    own = [rank for rank, color in enumerate(ranks) if color != MPI.UNDEFINED]
    if highest(node, len(own) < node.Get_size()) == [0]:
        return node
    part = cast(MPI.Intracomm, node.Split(own[0]))
    node.Free()
    return part


def _core_share(node: MPI.Intracomm) -> float:
    """Return this rank's share of the node's cores. Collective.

    Cores that several ranks may use are divided among them.
    """
    own = available_cores()
    everyone = gather_likely_equal(node, own)
    users = collections.Counter(core for cores in everyone for core in cores)
    return sum(1 / users[core] for core in own)


@dataclasses.dataclass
class Topology:
    """The communicators of one strategy, all owned by it. Freed by `close`."""

    comm: MPI.Intracomm
    node: MPI.Intracomm
    rank: int
    size: int
    local_rank: int
    failures: FailureDetector  # of ranks of `comm`
    pids: dict[int, int]  # of the other ranks of this node, see `monitor_processes`
    core_share: float  # of the cores that this rank may use, see `_core_share`
    closed: bool = False
    devices: tuple[str, ...] = ()  # of all ranks
    node_sizes: tuple[int, ...] = ()  # how many ranks each node has, ascending

    @classmethod
    def create(cls, communicator: MPI.Intracomm | None = None) -> Topology:
        """Duplicate `communicator` (COMM_WORLD by default). Collective over it.

        Raises:
          ArgumentError, ArgumentTypeError: `communicator` is not a communicator, or was
            freed.
          ContextError: this process was forked from a rank; MPI was finalized.
          LaunchError: MPI sees one process, but the launcher started several; on all
            ranks: they have different versions of mpidist, or levels of threads in MPI;
            MPIDIST_RANKS_PER_NODE is not a positive number, or differs.
        """
        if is_forked():
            raise ContextError(FORKED)
        if MPI.Is_finalized():
            raise ContextError("MPI was finalized, and a strategy needs it")
        if communicator is None:
            communicator = MPI.COMM_WORLD
        if not isinstance(communicator, MPI.Intracomm):
            raise ArgumentTypeError(
                "communicator must be an mpi4py.MPI.Intracomm, not "
                f"{validation.shown(communicator)}"
            )
        if communicator == MPI.COMM_NULL:
            raise ArgumentError("communicator must not be MPI.COMM_NULL, or freed")
        if communicator == MPI.COMM_WORLD and communicator.Get_size() == 1:
            check_launch(os.environ, 1, MPI.Get_library_version())
        members = communicator.group.Translate_ranks(None, MPI.COMM_WORLD.group)
        with Pending("making a strategy", communicator, members):
            return cls._of_duplicate(communicator)

    @classmethod
    def _of_duplicate(cls, communicator: MPI.Intracomm) -> Topology:
        comm = communicator.Dup()
        pretended = None
        if communicator != MPI.COMM_SELF:  # the default strategy's, made by the import
            try:
                pretended = _compare_starts(os.environ, comm)
            except LaunchError:  # on all ranks
                comm.Free()
                raise
        failures = FailureDetector(comm)
        node = _ranks_that_share_memory(comm)
        if pretended:
            whole = node
            node = cast(MPI.Intracomm, whole.Split(whole.Get_rank() // pretended))
            whole.Free()
        return cls(
            comm=comm,
            node=failures.add(node),
            rank=comm.Get_rank(),
            size=comm.Get_size(),
            local_rank=node.Get_rank(),
            failures=failures,
            pids=monitor_processes(comm, node),
            core_share=_core_share(node),
        )

    @property
    def has_neighbours(self) -> bool:
        """Whether there are ranks that share a node; the same on all ranks."""
        return max(self.node_sizes) > 1

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks share memory; the same on all ranks."""
        return self.node.Get_size() == self.size

    def require_open(self) -> None:
        """Raise a ContextError if `close` was called."""
        if self.closed:
            raise ContextError(FINALIZED)

    def close(self, can_free: bool = True) -> None:
        """Free the communicators; a second call does nothing. Collective.

        Args:
          can_free: False if some rank has left them: then they are not freed.
        """
        if not self.closed:
            self.closed = True
            self.failures.close()
            for comm in (self.node, self.comm) if can_free else ():
                self.failures.free(comm)

    def bind_device(self, devices: Sequence[str] | None) -> str:
        """Choose this rank's device, make it current if it is a GPU, return its name.

        Args:
          devices: None takes the GPU numbered by the local rank, or the CPU if no GPU
            can be used. A list of one device holds for every rank, a longer list is
            indexed by the local rank.

        Raises:
          ArgumentError: a malformed device, or fewer devices than local ranks.
          LaunchError: a GPU that this rank cannot use.
        """
        if devices is None:
            # A launcher that binds GPUs shows each rank only its own. If there are too
            # few, ranks share them; whether they may is checked after all have chosen
            visible = gpu_count()
            kind, index = ("GPU", self.local_rank % visible) if visible else ("CPU", 0)
        else:
            parsed = parse_devices(devices)
            if len(parsed) > 1 and self.local_rank >= len(parsed):
                raise ArgumentError(
                    f"devices names {len(parsed)} devices, too few for local rank "
                    f"{self.local_rank}: name one per rank on the node, or one for all"
                )
            kind, index = parsed[min(self.local_rank, len(parsed) - 1)]
        if kind == "GPU":
            use_gpu(index)
        return f"{kind}:{index}"
