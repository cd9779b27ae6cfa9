"""Collective checks of the doctor, each exchange with a deadline."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpidist.comm import device_info
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.device_info import GpuRequest
from mpidist.comm.replica_group import ReplicaGroup
from mpidist.comm.topology import Topology
from mpidist.comm.transports.tuning import short_name
from mpidist.device import arrays, probe
from mpidist.errors import LaunchError
from mpidist.launch.launchers import check_launch
from mpidist.tools.doctor import evaluate
from mpidist.tools.doctor.children import Channel, end_with_parent
from mpidist.tools.doctor.evaluate import RankFacts
from mpidist.tools.doctor.gpu_checks import GpuChoice, GpuFacts
from mpidist.tools.doctor.node_checks import (
    LaunchFacts,
    find_launched,
    find_node,
    is_hydra,
    is_silent,
)
from mpidist.tools.doctor.path_checks import PathTrials, try_alone
from mpidist.tools.doctor.results import CheckResult, Failure, Status, describe_error
from mpidist.util.available_memory import as_text
from mpidist.util.settings import ALLOW_SINGLETON, RANKS_PER_NODE

__all__ = ["Speed", "check_speed", "examine_ranks"]

_PROBE_SECONDS = 130.0  # the programs that `probe.run` starts have limits of their own
_MARGIN_SECONDS = 10.0
_LARGE_BYTES = 4 << 20
_LATENCIES, _BANDWIDTHS, _WARM_UP = 200, 10, 3
# Of 8 bytes. Ranks with cores of their own take less over any network
_SLOW_SECONDS = 1e-3


def examine_ranks(
    channel: Channel[Any, Any],
    paths: Sequence[str],
    seconds: float,
    facts: RankFacts,
    environ: Mapping[str, str],
) -> None:
    """Start MPI, check what needs all ranks, and report. Collective.

    Args:
      channel: to the process that the launcher started, which prints.
      paths: of the job's files.
      seconds: how long each check may take.
      facts: of this process, from before MPI started.
      environ: the environment before MPI started, which may change it.
    """
    job = _Job(4 * seconds)  # some ranks may come later by the time of a check
    channel.send(("joined", (job.rank, job.size)))
    if job.size == 1 and is_silent(environ):
        return  # MPI has not joined this process with those that the launcher started
    examination = _Examination(channel, job, paths, seconds, facts, environ)
    examination.run()
    job.close()


class _Job:
    """All ranks of COMM_WORLD. Collective to make.

    Args:
      seconds: how long to wait for the other ranks.

    Raises:
      DeadlineError: on ranks that waited longer.
    """

    def __init__(self, seconds: float):
        waiting = Consensus(MPI.COMM_WORLD)
        comm, request = MPI.COMM_WORLD.Idup()
        waiting.wait(request, time.monotonic() + seconds, "starting")
        waiting.close()
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._consensus = Consensus(self.comm)
        self.local_rank = self.rank

    def find_launch(self, environ: Mapping[str, str]) -> LaunchFacts:
        """Return what MPI says of this rank, and set `local_rank`. Collective.

        Args:
          environ: see `examine_ranks`.
        """
        error = ""
        self.local_rank, node = self._find_node()
        library = MPI.Get_library_version()
        try:
            check_launch(environ, MPI.COMM_WORLD.Get_size(), library)
        except LaunchError as caught:
            error = str(caught)
        launched = find_launched(environ)
        return LaunchFacts(
            self.size,
            MPI.Get_processor_name(),
            node,
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
            ALLOW_SINGLETON.read_or_default(environ),
            RANKS_PER_NODE.text(environ) or "",
        )

    def _find_node(self) -> tuple[int, int]:
        """Return this rank's number on its node, and the lowest rank on the node."""
        try:
            topology = Topology.create(self.comm)
        except LaunchError:  # on all ranks: MPIDIST_RANKS_PER_NODE is not a number
            return self.rank, 0
        try:
            return topology.local_rank, int(topology.node.bcast(self.rank))
        finally:
            topology.close()

    def gather(self, what: str, value: Any, seconds: float) -> list[Any]:
        """Return the values of all ranks on rank 0, and [] elsewhere. Collective.

        Raises:
          DeadlineError: on ranks that waited longer; names the missing ranks.
        """
        deadline = time.monotonic() + seconds
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        sizes = np.zeros(self.size, np.int64)
        request = self.comm.Iallgather(np.array([data.size]), sizes)
        self._consensus.wait(request, deadline, what)
        everything, receive = np.empty(int(sizes.sum()), np.uint8), None
        if self.rank == 0:
            receive = [everything, sizes]
        request = self.comm.Igatherv(data, receive)
        self._consensus.wait(request, deadline, what)
        if self.rank:
            return []
        ends = np.cumsum(sizes)
        return [pickle.loads(everything[e - n : e].data) for n, e in zip(sizes, ends)]

    def broadcast(self, what: str, value: Any, seconds: float) -> Any:
        """Return rank 0's value. Collective.

        Raises:
          DeadlineError: see `gather`.
        """
        deadline = time.monotonic() + seconds
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        size = np.array([data.size])
        self._consensus.wait(self.comm.Ibcast(size), deadline, what)
        if self.rank:
            data = np.empty(int(size[0]), np.uint8)
        self._consensus.wait(self.comm.Ibcast(data), deadline, what)
        return pickle.loads(data.data)

    def close(self) -> None:
        """Finalize MPI. Collective."""
        self._consensus.close()
        self.comm.Free()
        MPI.Finalize()


class _Examination:
    """The checks of one rank, and on rank 0 the facts of all ranks so far."""

    def __init__(
        self,
        channel: Channel[Any, Any],
        job: _Job,
        paths: Sequence[str],
        seconds: float,
        facts: RankFacts,
        environ: Mapping[str, str],
    ):
        self._channel = channel
        self._job = job
        self._paths = paths
        self._seconds = seconds
        self._facts = facts
        self._environ = environ
        self._everyone: dict[int, RankFacts] = {}
        self._speeds: list[CheckResult] = []

    def run(self) -> None:
        """Run all checks, let rank 0 print, and agree on the status. Collective."""
        seconds = self._seconds
        # Ranks arrive here at different times: a path or a package may be slow on some
        self._step("gathering facts", 2 * seconds, self._find_node)
        self._step("finding nodes", seconds, self._find_launch)
        self._step("trying paths", 6 * seconds, self._try_paths)
        self._step("trying GPUs", seconds + _PROBE_SECONDS, self._choose_gpu)
        if self._job.size > 1:
            self._measure()
        self._end()

    def _step(self, name: str, seconds: float, check: Callable[[], None]) -> None:
        """Run a check, and gather and evaluate all facts on rank 0. Collective."""
        limit = seconds + _MARGIN_SECONDS
        self._channel.send(("stage", (name, 2 * limit)))
        check()
        self._everyone = dict(enumerate(self._job.gather(name, self._facts, limit)))
        self._report()

    def _report(self) -> None:
        if self._everyone:
            rows = evaluate.evaluate(self._everyone, self._paths)
            self._channel.send(("rows", [*rows, *self._speeds]))

    def _find_node(self) -> None:
        self._facts = dataclasses.replace(self._facts, node=_attempt(find_node))

    def _find_launch(self) -> None:
        """Let MPI say which ranks share a node. Collective."""
        launch = self._job.find_launch(self._environ)
        self._facts = dataclasses.replace(self._facts, launch=launch)

    def _try_paths(self) -> None:
        """Try the paths, and whether ranks see each other's locks. Collective."""
        job, limit = self._job, 4 * self._seconds + _MARGIN_SECONDS
        if job.size == 1:
            reports = try_alone(self._paths, self._seconds)
        else:
            with PathTrials(self._paths, self._seconds) as trials:
                trials.look(is_writer=job.local_rank == 0, is_holder=job.rank == 0)
                held = job.broadcast("trying locks", trials.held, limit)
                # Two ranks of each node are enough
                if job.rank > 0 and job.local_rank < 2:
                    trials.see(held)
                job.gather("trying locks", None, limit)
                reports = trials.reports
        self._facts = dataclasses.replace(self._facts, paths=reports)

    def _choose_gpu(self) -> None:
        found = self._facts.gpus
        choice = None
        if isinstance(found, GpuFacts) and found.gpus:
            choice = _attempt(_choose_gpu, self._job, found)
        self._facts = dataclasses.replace(self._facts, choice=choice)

    def _measure(self) -> None:
        """Measure the speed of all_reduce on CPUs, and on GPUs. Collective."""
        limit = self._seconds + _MARGIN_SECONDS
        kinds = (evaluate.are_gpus_usable(self._everyone), self._is_cuda_aware())
        use_gpus, is_aware = self._job.broadcast("measuring", kinds, limit)
        choice = self._facts.choice
        number = choice.number if isinstance(choice, GpuChoice) else None
        for gpu in [None, number] if use_gpus else [None]:
            what = f"all_reduce, {'CPU' if gpu is None else 'GPU'}"
            self._channel.send(("stage", (what, limit)))
            speed = _attempt(_measure_speed, self._job.comm, gpu, is_aware)
            if isinstance(speed, Failure):
                row = CheckResult(
                    Status.FAIL, what, speed.text, "jobs would fail in the same way"
                )
            else:
                row = check_speed(speed, self._job.size)
            self._speeds.append(row)
            self._report()

    def _is_cuda_aware(self) -> bool:
        choices = [facts.choice for facts in self._everyone.values()]
        tried = [c.tried for c in choices if isinstance(c, GpuChoice) and c.tried]
        return bool(tried) and all(is_aware for is_aware, _ in tried)

    def _end(self) -> None:
        """Let rank 0 print, and agree on the exit status. Collective.

        Some launchers lose the status of one rank among others, or kill the others.
        MPICH's mpirun kills the processes that still run a moment after another one has
        finalized MPI and ended. So there it is the children, which mpirun does not
        know, that finalize MPI, after their parents have ended.
        """
        channel, limit = self._channel, self._seconds + _MARGIN_SECONDS
        channel.send(("stage", ("ending", 2 * limit)))
        status = 0
        if self._job.rank == 0:
            channel.send(("print", None))
            status = channel.recv()
        status = self._job.broadcast("ending", status, limit)
        if is_hydra():
            end_with_parent(0)
            signal.alarm(int(_MARGIN_SECONDS))
        channel.send(("status", status))
        if is_hydra():
            with contextlib.suppress(EOFError, OSError):
                channel.recv()


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns, or a Failure."""
    try:
        return function(*arguments)
    except Exception as error:
        return Failure(describe_error(error))


def _choose_gpu(job: _Job, found: GpuFacts) -> GpuChoice:
    """Return the GPU that a strategy would use, and whether MPI reads its memory."""
    number = job.local_rank % len(found.gpus)
    choice = GpuChoice(MPI.Get_processor_name(), number, *found.gpus[number])
    if job.size == 1:
        return choice
    library = MPI.Get_library_version().partition("\n")[0].rstrip("\0 ")
    asked = device_info.ask(library, os.environ)
    choice = choice._replace(asked=asked and (asked.is_aware, asked.why))
    # One rank of each node tries, unless MPI says that it would crash
    if job.local_rank == 0 and (asked is None or asked.is_aware):
        choice = choice._replace(tried=probe.run(number)[:2])
    return choice


class Speed(NamedTuple):
    """Median times of the slowest rank.

    Args:
      device: where the arrays are: "CPU" or "GPU".
      latency_seconds: of 8 bytes.
      large_seconds: of _LARGE_BYTES.
      transport: of the large array.
      is_right: whether all sums were right.
    """

    device: str
    latency_seconds: float
    large_seconds: float
    transport: str
    is_right: bool


def _measure_speed(comm: MPI.Intracomm, gpu: int | None, is_aware: bool) -> Speed:
    """Time all_reduce as a strategy runs it. Collective.

    Args:
      comm: the ranks.
      gpu: the number of this rank's GPU; None for CPUs, on all ranks.
      is_aware: whether MPI takes addresses of GPU memory.
    """
    devices = ["CPU:0"] if gpu is None else [f"GPU:{gpu}"]
    group = ReplicaGroup(
        devices, None, comm, GpuRequest(allow_shared=True, cuda_aware=is_aware)
    )
    try:
        small, is_small_right = _time(group, 1, _LATENCIES)
        large, is_large_right = _time(group, _LARGE_BYTES // 8, _BANDWIDTHS)
        return Speed(
            group.device.partition(":")[0],
            comm.allreduce(small, MPI.MAX),
            comm.allreduce(large, MPI.MAX),
            group.collectives.transport.name,
            comm.allreduce(is_small_right and is_large_right, MPI.LAND),
        )
    finally:
        group.close("doctor")


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


def check_speed(speed: Speed, ranks: int) -> CheckResult:
    """Return a row on the speed of all_reduce."""
    what = f"all_reduce, {speed.device}"
    rate = _LARGE_BYTES / speed.large_seconds
    found = f"{ranks} ranks: 8 bytes in {speed.latency_seconds * 1e6:.3g} us, "
    found += f"{as_text(_LARGE_BYTES)} at {as_text(rate)}/s by {speed.transport}"
    if not speed.is_right:
        remedy = (
            "do not run jobs there; try another MPI library, and MPIDIST_CUDA_AWARE=0"
        )
        return CheckResult(Status.FAIL, what, f"WRONG SUMS; {found}", remedy)
    if speed.latency_seconds > _SLOW_SECONDS:
        remedy = (
            "check that nothing else runs there, that ranks have their own cores, and "
            "that MPI uses the fast network"
        )
        return CheckResult(Status.WARN, what, found, remedy)
    return CheckResult(Status.OK, what, found)
