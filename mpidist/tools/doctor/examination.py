"""The examination: every rank looks, rank 0 hears of it and judges."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidist.tools.doctor import gpu_checks, judging
from mpidist.tools.doctor.finding import Failure, Finding, Status, describe_error
from mpidist.tools.doctor.gpu_checks import GpuChoice, GpuFacts
from mpidist.tools.doctor.hdf5_checks import find_hdf5
from mpidist.tools.doctor.judging import RankFacts
from mpidist.tools.doctor.launch_checks import is_silent
from mpidist.tools.doctor.node_checks import find_node
from mpidist.tools.doctor.path_checks import Paths
from mpidist.tools.doctor.python_checks import NEEDED, find_python, try_import
from mpidist.tools.doctor.supervisor import Outlet
from mpidist.tools.doctor.workers import Worker

if TYPE_CHECKING:
    from mpidist.tools.doctor.job import Job

__all__ = ["STARTING", "Request", "examine"]

STARTING = "starting MPI"
_TRIAL_SECONDS = 130.0  # the trials of `gpu.trial` end by themselves
_MARGIN_SECONDS = 10.0
# Checks end by themselves; so many times as long, and something else is wrong
_BUSY_TIMES = 10
_NO_MPI_REMEDY = (
    "pip install mpidist[mpich], or mpi4py with the MPI of the site; the loader must "
    "find libmpi (MPI4PY_LIBMPI, LD_LIBRARY_PATH)"
)
_LOOKS = {"hdf5": find_hdf5, "gpus": gpu_checks.find_gpus}


class Request(NamedTuple):
    """What to examine.

    Args:
      paths: of the job's files.
      seconds: how long each check may take.
    """

    paths: Sequence[str]
    seconds: float


def examine(request: Request, outlet: Outlet, no_mpi: Finding | None = None) -> None:
    """Look at everything, and tell `outlet`. Collective, unless `no_mpi` is given.

    Args:
      request: what to examine.
      outlet: hears of all that was found, from each rank.
      no_mpi: a row that says why MPI is not to be started.
    """
    # Where the environment goes to MPI, it may change it
    environ = dict(os.environ)
    limit = _BUSY_TIMES * request.seconds + _MARGIN_SECONDS
    outlet.stage("looking at this process", limit)
    facts = RankFacts(**_look(request.seconds))
    paths = Paths(request.paths, request.seconds)
    job: Job | None = None
    try:
        examination = _Examination(request, outlet, paths, facts)
        outlet.rows(judging.judge_processes({0: facts}))
        no_mpi = no_mpi or _find_obstacle(facts)
        if no_mpi is None:
            job = examination.start(environ)
        else:
            examination.first.append(no_mpi)
        if (job is None or job.size == 1) and is_silent(environ):
            outlet.rows(examination.first)
            return
        examination.go_on(job)
        paths.close()
        examination.end(job)
    finally:
        paths.close()
    if job is not None:
        job.close()


def _look(seconds: float) -> dict[str, Any]:
    """Return the facts that need no other rank, by name."""
    workers = {name: Worker() for name in (*_LOOKS, *NEEDED)}
    for name, look in _LOOKS.items():
        workers[name].ask(look)
    for name in NEEDED:
        workers[name].ask(try_import, name)
    deadline = time.monotonic() + seconds
    found = {name: worker.answer(deadline) for name, worker in workers.items()}
    for worker in workers.values():
        worker.close()
    packages = {name: found.pop(name) for name in NEEDED}
    return {"python": find_python(packages), **found}


def _find_obstacle(facts: RankFacts) -> Finding | None:
    """Return a row if this process would not live to start MPI."""
    python = facts.python
    if isinstance(python, Failure):
        return None
    broken = [
        n for n, version in python.packages.items() if isinstance(version, Failure)
    ]
    needed = [name for name in broken if name != "deflate"]  # only files need that
    if not needed:
        return None
    found = f"not tried, as {', '.join(needed)} cannot be imported"
    return Finding(Status.FAIL, STARTING, found, "see the rows below")


class _Examination:
    """What one rank has found so far, and on rank 0 what all have."""

    def __init__(
        self, request: Request, outlet: Outlet, paths: Paths, facts: RankFacts
    ):
        self._request = request
        self._outlet = outlet
        self._paths = paths
        self._facts = facts
        self._everyone: dict[int, RankFacts] = {}
        # Rows that stand above and below those on all facts
        self.first: list[Finding] = []
        self._last: list[Finding] = []

    def start(self, environ: Mapping[str, str]) -> Job | None:
        """Start MPI; return None, and add a row, where that raises. Collective."""
        limit = 4 * self._request.seconds  # others may come later by one
        self._outlet.stage(STARTING, limit + _MARGIN_SECONDS)
        try:
            from mpidist.launch import mpi_defaults  # noqa: F401 - before MPI starts
            from mpidist.tools.doctor.job import Job

            job = Job(limit)
        except Exception as error:
            found = describe_error(error)
            self.first.append(Finding(Status.FAIL, STARTING, found, _NO_MPI_REMEDY))
            return None
        self._outlet.size(job.size)
        self._outlet.rank(job.rank)
        launch = job.find_launch(environ)
        self._facts = dataclasses.replace(self._facts, launch=launch)
        return job

    def go_on(self, job: Job | None) -> None:
        """Do what ranks do together. Collective."""
        seconds = self._request.seconds
        node: Any = _attempt(find_node)
        self._facts = dataclasses.replace(self._facts, node=node)
        if job is None:
            self._tell([self._facts])
            self._outlet.stage("trying paths", 6 * seconds + _MARGIN_SECONDS)
            self._try_paths(None)
            return
        # Ranks come here at unlike times: where a path or a package is slow
        limit = 2 * seconds + _MARGIN_SECONDS
        self._step(job, "gathering facts", limit, lambda: None)
        limit = 6 * seconds + _MARGIN_SECONDS
        self._step(job, "trying paths", limit, lambda: self._try_paths(job))
        self._choose_gpus(job)
        if job.size > 1:
            self._measure(job)

    def end(self, job: Job | None) -> None:
        """Let rank 0 report, and all end with the same status. Collective.

        Some launchers lose the status of one rank among others, or kill the others.
        """
        limit = self._request.seconds + _MARGIN_SECONDS
        self._outlet.stage("ending", 2 * limit)
        status = self._outlet.report() if job is None or job.rank == 0 else 0
        if job is not None:
            status = job.share("ending", status, limit)
        self._outlet.status(status)

    def _step(
        self, job: Job, name: str, limit: float, do: Callable[[], object]
    ) -> None:
        """Do something, and let rank 0 judge what all found until then. Collective."""
        self._outlet.stage(name, 2 * limit)
        do()
        self._tell(job.gather(name, self._facts, limit))

    def _tell(self, everyone: list[RankFacts]) -> None:
        """Tell the outlet what is to be said of all ranks; on rank 0."""
        if everyone:
            self._everyone = dict(enumerate(everyone))
            rows = judging.judge(self._everyone, self._request.paths)
            self._outlet.rows([*self.first, *rows, *self._last])

    def _try_paths(self, job: Job | None) -> None:
        """Let ranks look at the paths, and see each other's locks. Collective."""
        limit = 4 * self._request.seconds + _MARGIN_SECONDS
        is_first = job is None or job.rank == 0
        held = self._paths.look(job is None or job.local_rank == 0, is_first)
        if job is None or job.size == 1:
            self._paths.see_own()
        else:
            held = job.share("trying locks", held, limit)
            # Two of each node are enough
            if not is_first and job.local_rank < 2:
                self._paths.see(held)
            job.gather("trying locks", None, limit)
        if is_first:
            self._paths.release()
        self._facts = dataclasses.replace(self._facts, paths=self._paths.reports())
        if job is None:
            self._tell([self._facts])

    def _choose_gpus(self, job: Job) -> None:
        """Let each rank take its GPU, and try MPI on it. Collective."""
        found = self._facts.gpus
        has_gpus = isinstance(found, GpuFacts) and bool(found.gpus)
        limit = self._request.seconds + _TRIAL_SECONDS

        def choose() -> None:
            choice = _attempt(_choose, job, found) if has_gpus else None
            self._facts = dataclasses.replace(self._facts, choice=choice)

        self._step(job, "trying GPUs", limit, choose)

    def _measure(self, job: Job) -> None:
        """Measure the speed of collectives. Collective."""
        from mpidist.tools.doctor.speed import check_speed, measure

        limit = self._request.seconds + _MARGIN_SECONDS
        kinds = (judging.are_gpus_usable(self._everyone), self._is_aware())
        use_gpus, is_aware = job.share("measuring", kinds, limit)
        choice = self._facts.choice
        index = choice.number if isinstance(choice, GpuChoice) else None
        for gpu in [None, index] if use_gpus else [None]:
            kind = "CPU" if gpu is None else "GPU"
            self._outlet.stage(f"all_reduce, {kind}", limit)
            speed = _attempt(measure, job.comm, gpu, is_aware)
            if isinstance(speed, Failure):
                what, remedy = f"all_reduce, {kind}", "this is what jobs would meet"
                self._last.append(Finding(Status.FAIL, what, speed.text, remedy))
            else:
                self._last += check_speed(speed, job.size)
            self._tell(list(self._everyone.values()))

    def _is_aware(self) -> bool:
        choices = [facts.choice for facts in self._everyone.values()]
        tried = [c.tried for c in choices if isinstance(c, GpuChoice) and c.tried]
        return bool(tried) and all(is_aware for is_aware, _ in tried)


def _attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns, or a Failure."""
    try:
        return function(*arguments)
    except Exception as error:
        return Failure(describe_error(error))


def _choose(job: Job, found: GpuFacts) -> GpuChoice:
    """Return the GPU that a strategy would take, and what MPI does with it."""
    from mpi4py import MPI

    from mpidist.comm import device_info
    from mpidist.device import probe

    index = job.local_rank % len(found.gpus)
    choice = GpuChoice(MPI.Get_processor_name(), index, *found.gpus[index])
    if job.size == 1:
        return choice
    library = MPI.Get_library_version().partition("\n")[0].rstrip("\0 ")
    asked = device_info.ask(library, os.environ)
    choice = choice._replace(asked=asked and (asked.is_aware, asked.why))
    # One rank of each node tries, unless MPI says that it would crash
    if job.local_rank == 0 and (asked is None or asked.is_aware):
        choice = choice._replace(tried=probe.run(index)[:2])
    return choice
