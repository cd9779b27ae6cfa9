"""Running one pytest per rank: private communicators, and an end to every hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import mpidist

sys.path.insert(0, str(Path(__file__).parent))
import launching
import slurm_cluster

# Their assertions say what differs, as those of tests do
pytest.register_assert_rewrite("hdf5_files", "hdf5_kinds", "hdf5_damage")

WORLD = MPI.COMM_WORLD.Dup()

# Where there is one GPU, the ranks of a test have to share it
os.environ.setdefault("MPIDIST_ALLOW_SHARED_GPU", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Ranks that share one would remove each other's old folders at the same time
    if config.option.basetemp is None:
        config.option.basetemp = tempfile.mkdtemp(prefix=f"mpidist-{WORLD.rank}-")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp))


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    # Every rank runs the same tests: one report is enough
    if WORLD.rank > 0:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115


def pytest_report_header() -> list[str]:
    vendor = " ".join(map(str, MPI.get_vendor()))
    missing = why_no_slurm()
    slurm = f"none, its tests are skipped: {missing}" if missing else "two nodes"
    return [f"mpi: {WORLD.size} ranks, {vendor}", f"slurm: {slurm}"]


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark what ranks do together, and what starts jobs of its own.

    Three ranks would do as two what is not the former, or is the latter: left out.
    """
    for item in items:
        for name in ("comm", "mpirun"):
            if name in item.fixturenames:
                item.add_marker(name)
    if WORLD.size > 2:
        kept = [
            item
            for item in items
            if item.get_closest_marker("comm") and not item.get_closest_marker("mpirun")
        ]
        config.hook.pytest_deselected(items=[i for i in items if i not in kept])
        items[:] = kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None]:
    """End the job when a test fails on some rank: the others may be waiting for it."""
    report = yield
    if report.failed and WORLD.size > 1:
        manager = item.config.pluginmanager.get_plugin("capturemanager")
        manager.suspend_global_capture()
        print(
            f"\nrank {WORLD.rank} of {WORLD.size}: {item.nodeid} failed in "
            f"{report.when}\n{report.longreprtext}\n{report.capstdout}"
            f"{report.capstderr}",
            file=sys.stderr,
            flush=True,
        )
        WORLD.Abort(1)
    return report


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[MPI.Intracomm]:
    """A communicator of all ranks for one test, which all ranks must be in."""
    comm = WORLD.Dup()
    tests = comm.allgather(request.node.nodeid)
    assert len(set(tests)) == 1, f"the ranks are in different tests: {tests}"
    yield comm
    comm.Barrier()
    comm.Free()


def why_no_slurm() -> str | None:
    """Return why the tests under Slurm cannot run, or None."""
    if WORLD.size > 1:
        return "they start ranks of their own, so run them in one process"
    return slurm_cluster.what_is_missing()


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurm_cluster.Cluster]:
    """A running Slurm of two nodes, for the tests of one process.

    Where none can be had, tests are skipped; with MPIDIST_NEED_SLURM=1 they fail.
    """
    missing = why_no_slurm()
    if missing and os.environ.get("MPIDIST_NEED_SLURM") == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)
    with slurm_cluster.Cluster() as cluster:
        yield cluster


@pytest.fixture
def strategy(comm: MPI.Intracomm) -> Iterator[mpidist.MirroredStrategy]:
    """A strategy over all ranks for one test."""
    strategy = mpidist.MirroredStrategy(communicator=comm)
    yield strategy
    strategy.experimental_finalize()


@pytest.fixture
def mpirun(comm: MPI.Intracomm) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs a Python script under mpirun, once for all ranks of a test.

    `mpirun(ranks, "script.py", "argument", VARIABLE="value")`; a script is a path, or
    the text of one if it holds a newline. `options` are mpirun's.
    """

    def start(
        ranks: int,
        script: str,
        *arguments: str,
        options: Sequence[str] = (),
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        result: Any = None
        if comm.rank == 0:
            code = ["-c", script] if "\n" in script else [script]
            mpirun = launching.mpirun_command(ranks, *options)
            command = [*mpirun, sys.executable, *code]
            try:
                result = launching.run([*command, *arguments], **environment)
            except AssertionError as error:
                result = error
        # Wait without taking the job's processor time
        done = comm.Ibarrier()
        while not done.Test():
            time.sleep(0.01)
        result = comm.bcast(result)
        if isinstance(result, AssertionError):
            raise result
        return result

    return start
