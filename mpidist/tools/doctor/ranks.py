"""The checks of all ranks together, each exchange with a deadline."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.device_info import GpuFacts, GpuRequest
from mpidist.comm.replica_group import ReplicaGroup, banner
from mpidist.comm.topology import Topology
from mpidist.comm.transports.tuning import short_name
from mpidist.device import arrays
from mpidist.errors import LaunchError
from mpidist.launch.launchers import check_launch, is_silent
from mpidist.tools.doctor import checks
from mpidist.tools.doctor.children import end_with_parent, receive, send
from mpidist.tools.doctor.paths import try_alone, try_locks, try_paths
from mpidist.tools.doctor.rows import FAIL, OK, WARN, Row, as_rows, describe_error
from mpidist.util.available_memory import as_text
from mpidist.util.settings import CUDA_AWARE

_PROBE_SECONDS = 130.0  # programs that try a GPU have limits of their own
_MARGIN_SECONDS = 10.0
_THREAD_LEVELS = (
    *(MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED),
    *(MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE),
)
_LARGE_BYTES = 4 << 20
_LATENCIES, _BANDWIDTHS, _WARM_UP = 200, 10, 3
# Of 8 bytes. Ranks with cores of their own take less over any network
_SLOW_SECONDS = 1e-3


def examine_ranks(
    paths: Sequence[str], seconds: float, rows: list[Row], environ: Mapping[str, str]
) -> None:
    """Start MPI, check what needs all ranks, and report. Collective.

    Args:
      paths: of the job's files.
      seconds: how long each check may take.
      rows: of this process, from before MPI started.
      environ: the environment before MPI started, which may change it.
    """
    job = _Job(paths, seconds, rows)
    send("joined", (job.rank, job.size))
    if job.size == 1 and is_silent(environ):
        return  # MPI has not joined this process with those that the launcher started
    job.run(environ)


class _Job:
    """All ranks of COMM_WORLD, and this one's rows so far. Collective to make.

    A DeadlineError of an exchange names the missing ranks.
    """

    def __init__(self, paths: Sequence[str], seconds: float, rows: list[Row]):
        self._paths, self._seconds, self._rows = paths, seconds, rows
        self._table: list[Row] = []  # on rank 0
        self._comm = MPI.COMM_WORLD
        self._consensus = Consensus(self._comm)
        # Some ranks may come later by the time of a check
        self._consensus.require_same("starting", timeout=4 * seconds)
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()
        self._local_rank, self._local_size = self.rank, self.size

    def run(self, environ: Mapping[str, str]) -> None:
        """Run all checks, let rank 0 print, agree on the status, and end MPI."""
        seconds = self._seconds
        # Ranks arrive here at different times: a package may be slow on some
        self._facts = checks.find_facts(environ)
        self._step("gathering facts", 2 * seconds, lambda: None)
        self._step("finding nodes", seconds, lambda: self._check_mpi(environ))
        self._step("trying paths", 6 * seconds, self._try_paths)
        if self.size > 1 and self._try_strategy(None) != "CPU":
            self._try_strategy(["CPU:0"])
        self._end()
        self._consensus.close()
        MPI.Finalize()

    def _announce(self, stage: str, seconds: float) -> None:
        send("stage", (stage, 2 * (seconds + _MARGIN_SECONDS)))

    def _step(self, name: str, seconds: float, check: Callable[[], None]) -> None:
        """Run a check; gather and evaluate rows and facts of all ranks. Collective."""
        self._announce(name, seconds)
        check()
        result = self._rows, self._facts
        results = self._gather(name, result, seconds + _MARGIN_SECONDS)
        if results:
            rows, facts = (dict(enumerate(column)) for column in zip(*results))
            self._table = checks.evaluate(rows, facts)
            send("rows", self._table)

    def _gather(self, what: str, value: Any, seconds: float) -> list[Any]:
        """Return the values of all ranks on rank 0, and [] elsewhere. Collective."""
        self._consensus.require_same(what, timeout=seconds)
        return self._comm.gather(value) or []

    def _broadcast(self, what: str, value: Any, seconds: float) -> Any:
        """Return rank 0's value. Collective."""
        self._consensus.require_same(what, timeout=seconds)
        return self._comm.bcast(value)

    def _check_mpi(self, environ: Mapping[str, str]) -> None:
        """Let MPI say who is here, and which ranks share a node. Collective."""
        error, node = "", 0
        library = MPI.Get_library_version()
        try:
            check_launch(environ, self.size, library)
        except LaunchError as caught:
            error = str(caught)
        with contextlib.suppress(LaunchError):  # MPIDIST_RANKS_PER_NODE: on all ranks
            topology = Topology.create(self._comm)
            self._local_rank = topology.local_rank
            self._local_size = topology.node.Get_size()
            node = int(topology.node.bcast(self.rank))
            topology.close()
        self._facts = self._facts._replace(node=node)
        level = _THREAD_LEVELS.index(MPI.Query_thread())
        standard = ".".join(map(str, MPI.Get_version()))
        found = f"{short_name(library)}, standard {standard}"
        remedy = "start all ranks with one MPI library, on every node"
        self._rows.append(Row(OK, found, remedy, "MPI", unlike=FAIL))
        self._rows += as_rows("threads in MPI", checks.check_thread_level(level))
        launcher = checks.check_launcher(self.size, environ, error)
        self._rows += as_rows("launcher", launcher)
        if self._local_rank == 0:
            self._rows += checks.check_memory(self._local_size)

    def _try_paths(self) -> None:
        """Try the paths, and whether ranks see each other's locks. Collective."""
        limit = 4 * self._seconds + _MARGIN_SECONDS
        if self.size == 1:
            self._rows += try_alone(self._paths, self._seconds)
            return
        who = self._local_rank == 0, self.rank == 0
        with try_paths(self._paths, self._seconds, *who) as (rows, locks):
            self._rows += rows
            held = self._broadcast("trying locks", locks, limit)
            # Two ranks of each node are enough
            if self.rank > 0 and self._local_rank < 2:
                self._rows += try_locks(held, self._seconds)
            self._gather("trying locks", None, limit)

    def _try_strategy(self, devices: list[str] | None) -> str:
        """Report on a strategy and its speed; return the kind of its device."""
        has_gpu = any(row.what == "CUDA" for row in self._rows)
        limit = self._seconds + _PROBE_SECONDS * has_gpu
        self._announce("creating a strategy", limit)
        what = "strategy" if devices is None else "all_reduce, CPU"
        try:
            group = ReplicaGroup(devices, None, self._comm, GpuRequest())
        except Exception as error:
            self._add(_failed(what, error))
            return ""
        kind = group.device.partition(":")[0]
        if devices is None:
            self._add(check_strategy(banner(group).partition(": ")[2], group.gpus))
        what = f"all_reduce, {kind}"
        self._announce(what, self._seconds)
        try:
            self._add(_measure_speed(group, self._comm)._replace(what=what))
        except Exception as error:
            self._add(_failed(what, error))
        finally:
            group.close("doctor")
        return kind

    def _add(self, row: Row) -> None:
        self._table.append(row)
        send("rows", self._table)

    def _end(self) -> None:
        """Let rank 0 print, and agree on the exit status. Collective.

        Some launchers lose the status of one rank among others, or kill the others.
        MPICH's mpirun kills the processes that still run a moment after another one has
        finalized MPI and ended. So there it is the children, which mpirun does not
        know, that finalize MPI, after their parents have ended.
        """
        self._announce("ending", self._seconds)
        status = 0
        if self.rank == 0:
            send("print", None)
            status = receive()
        status = self._broadcast("ending", status, self._seconds + _MARGIN_SECONDS)
        if checks.is_hydra():
            end_with_parent(0)
            signal.alarm(int(_MARGIN_SECONDS))
        send("status", status)
        if checks.is_hydra():
            with contextlib.suppress(EOFError, OSError):
                receive()


def _failed(what: str, error: Exception) -> Row:
    return Row(FAIL, describe_error(error), "jobs would fail in the same way", what)


def check_strategy(found: str, gpus: GpuFacts | None) -> Row:
    """Return a row on a strategy that could be created, and on its GPUs."""
    row = Row(OK, found, what="strategy")
    if gpus is None:
        return row
    if CUDA_AWARE.read_or_default():
        remedy = f"unset {CUDA_AWARE.name}, or ranks crash if MPI takes no GPU pointers"
        return row._replace(status=WARN, remedy=remedy)
    if not gpus.support.is_aware and gpus.no_nccl:
        remedy = "arrays go through host memory; use a CUDA-aware MPI, or install NCCL"
        return Row(WARN, f"{found}; no NCCL: {gpus.no_nccl}", remedy, "strategy")
    return row


def _measure_speed(group: ReplicaGroup, comm: MPI.Intracomm) -> Row:
    """Time all_reduce as a strategy runs it. Collective."""
    small, is_small_right = _time(group, 1, _LATENCIES)
    large, is_large_right = _time(group, _LARGE_BYTES // 8, _BANDWIDTHS)
    return check_speed(
        group.num_replicas,
        comm.allreduce(small, MPI.MAX),
        comm.allreduce(large, MPI.MAX),
        group.collectives.transport.name,
        comm.allreduce(is_small_right and is_large_right, MPI.LAND),
    )


def _time(group: ReplicaGroup, count: int, repetitions: int) -> tuple[float, bool]:
    """Return the median time of an all_reduce, and whether all sums were right."""
    values: Any = group.zeros((count,), np.dtype(np.float64)) + (group.replica_id + 1)
    seconds, is_right = [], True
    expected = group.num_replicas * (group.num_replicas + 1) / 2
    for _ in range(_WARM_UP + repetitions):
        start = time.perf_counter()
        total = group.reduce("all_reduce", "SUM", values)
        if arrays.is_device_array(total):
            arrays.synchronize(total)
        seconds.append(time.perf_counter() - start)
        is_right = is_right and bool((total == expected).all())
    return sorted(seconds[_WARM_UP:])[repetitions // 2], is_right


def check_speed(
    ranks: int, small_seconds: float, large_seconds: float, by: str, is_right: bool
) -> Row:
    """Return a row on median times of the slowest rank: of 8 bytes, and of more."""
    rate = as_text(_LARGE_BYTES / large_seconds)
    found = f"{ranks} ranks: 8 bytes in {small_seconds * 1e6:.3g} us, "
    found += f"{as_text(_LARGE_BYTES)} at {rate}/s by {by}"
    if not is_right:
        remedy = "do not run jobs there; try another MPI library, and "
        return Row(FAIL, f"WRONG SUMS; {found}", f"{remedy}MPIDIST_CUDA_AWARE=0")
    if small_seconds > _SLOW_SECONDS:
        remedy = "check that nothing else runs there, that ranks have their own cores, "
        return Row(WARN, found, f"{remedy}and that MPI uses the fast network")
    return Row(OK, found)
