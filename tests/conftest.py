"""Running one pytest per rank: private communicators, and an end to every hang."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from mpi4py import MPI

import mpidist

sys.path.insert(0, str(Path(__file__).with_name("support")))
import launching
import slurm_cluster
import virtual_nodes

from mpidist.comm.topology import Topology
from mpidist.data.distributed import reader

# Their assertions say what differs, as those of tests do
pytest.register_assert_rewrite("hdf5_files", "hdf5_kinds", "hdf5_damage")

WORLD = MPI.COMM_WORLD.Dup()

# The same examples on all ranks, and no limits on how long one may take
settings.register_profile(
    "mpidist",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mpidist")

# Jobs that crash on purpose leave no memory dump behind
resource.setrlimit(
    resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1])
)

# Where there is one GPU, the ranks of a test have to share it
os.environ.setdefault("MPIDIST_ALLOW_SHARED_GPU", "1")
# Else JAX would take three quarters of a GPU's memory, and keep them
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all",
        action="store_true",
        help="run all tests; without it, and without names of files, -k or -m, a "
        "selection runs: all but those marked `slow` or `network`, and of a "
        "parametrized test as many cases as show each value of each parameter",
    )
    parser.addoption(
        "--rest", action="store_true", help="run what that selection leaves out"
    )
    parser.addoption(
        "--selection", action="store_true", help="run that selection with names, too"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Ranks that share one would remove each other's old folders at the same time
    if config.option.basetemp is None:
        config.option.basetemp = tempfile.mkdtemp(prefix=f"mpidist-{WORLD.rank}-")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp))


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    # A test that fails on any rank ends the job: one report is enough
    if WORLD.rank > 0:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115


def pytest_report_header(config: pytest.Config) -> list[str]:
    vendor = " ".join(map(str, MPI.get_vendor()))
    missing = why_no_slurm()
    slurm = f"none, its tests are skipped: {missing}" if missing else "two nodes"
    missing = why_no_network()
    nodes = f"none, their tests are skipped: {missing}" if missing else "there are"
    tests = "a selection, --all runs all" if is_selection(config) else "all"
    if config.option.rest:
        tests = "those that a selection leaves out"
    if WORLD.size == 2:
        tests += "; this rank counts half of those that need no other rank"
    header = f"mpi: {WORLD.size} ranks, {vendor}"
    return [header, f"slurm: {slurm}", f"virtual nodes: {nodes}", f"tests: {tests}"]


def is_selection(config: pytest.Config) -> bool:
    """Return whether a selection of the tests is to run: nothing else was asked for."""
    options = config.option
    folders = all(Path(argument).is_dir() for argument in config.args)
    more = options.all or options.rest or options.keyword or options.markexpr
    return options.selection or (folders and not more)


def select(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that show each feature and failure once, the same on all ranks.

    Of a parametrized test those cases are taken that are the first with some value of
    some parameter, so that each value is tried, but not each combination.
    """
    tried: set[tuple[str, str, int]] = set()
    kept = []
    for item in items:
        case = getattr(getattr(item, "callspec", None), "params", {})
        function = item.nodeid.partition("[")[0]
        values = {(function, name, id(value)) for name, value in case.items()}
        is_long = any(map(item.get_closest_marker, ("slow", "network")))
        if not is_long and (not values or values - tried):
            kept.append(item)
            tried |= values
    return kept


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark tests that communicate, and tests that start jobs; select.

    Two ranks divide the tests that do not communicate between them, and run these
    first: they wait for each other once. Three or more ranks run only those that
    communicate and start no jobs: the others do not depend on the number of ranks.
    """
    for item in items:
        for name in ("comm", "mpirun", "network"):
            if name in item.fixturenames:
                item.add_marker(name)
    kept = select(items) if is_selection(config) else items
    if config.option.rest:
        selected = set(select(items))
        kept = [item for item in items if item not in selected]
    if WORLD.size > 2:
        kept = [
            item
            for item in kept
            if item.get_closest_marker("comm") and not item.get_closest_marker("mpirun")
        ]
    if WORLD.size == 2:
        alone = [item for item in kept if not item.get_closest_marker("comm")]
        together = [item for item in kept if item.get_closest_marker("comm")]
        # Those that start jobs take longest: each rank has half of them
        alone.sort(key=lambda item: not item.get_closest_marker("mpirun"))
        kept = alone[WORLD.rank :: 2] + together
    if len(kept) < len(items):
        chosen = set(kept)
        config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
    items[:] = kept


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what lives as long as the tests."""
    gc.collect()
    gc.freeze()


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[object]:
    """Fail a test that would wait for the other rank, which has another test to run."""
    if WORLD.size != 2 or item.get_closest_marker("comm"):
        return (yield)
    create = Topology.create

    def create_alone(communicator: Any = None) -> Topology:
        if communicator in (None, MPI.COMM_WORLD, WORLD):
            pytest.fail("a test whose ranks communicate takes the fixture `comm`")
        return create(communicator)

    with mock.patch.object(Topology, "create", create_alone):
        return (yield)


@pytest.fixture(scope="session")
def variables() -> dict[str, str]:
    """The environment before the first test; scripts that are imported add to it."""
    return dict(os.environ)


@pytest.fixture(autouse=True)
def unchanged_environment(variables: dict[str, str]) -> Iterator[None]:
    """Leave no variable to later tests, and to the jobs that they start."""
    yield
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> Iterator[MPI.Intracomm]:
    """A communicator of all ranks for one test, which all ranks must be in."""
    comm, is_made = WORLD.Idup()
    wait_patiently(is_made)
    tests = comm.allgather(request.node.nodeid)
    assert len(set(tests)) == 1, f"the ranks are in different tests: {tests}"
    yield comm
    wait_patiently(comm.Ibarrier())
    comm.Free()


def wait_patiently(request: MPI.Request) -> None:
    """Wait without taking processor time from what another rank runs meanwhile."""
    start = time.monotonic()
    while not request.Test():
        time.sleep(min((time.monotonic() - start) / 4, 0.01))


def skip_or_fail(missing: str | None, variable: str) -> None:
    """Skip the test if something is missing; fail it if `variable` says it must run."""
    if missing and os.environ.get(variable) == "1":
        pytest.fail(missing)
    if missing:
        pytest.skip(missing)


def why_no_slurm() -> str | None:
    """Return why the tests under Slurm cannot run, or None."""
    if WORLD.size > 1:
        return "they start ranks of their own, so run them in one process"
    return slurm_cluster.what_is_missing()


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurm_cluster.Cluster]:
    """A running Slurm of two nodes, for the tests of one process.

    Where none can be had, tests are skipped; with GATE_NEED_SLURM=1 they fail.
    """
    skip_or_fail(why_no_slurm(), "GATE_NEED_SLURM")
    with slurm_cluster.Cluster() as cluster:
        yield cluster


def why_no_network() -> str | None:
    """Return why the tests on virtual nodes cannot run, or None."""
    if WORLD.size > 1:
        return "they start ranks of their own, so run them in one process"
    return virtual_nodes.what_is_missing()


@pytest.fixture
def network() -> Iterator[Callable[..., virtual_nodes.VirtualNodes]]:
    """A function that starts virtual nodes, `network(2, "1gbit")`, for one test.

    Where none can be had, tests are skipped; with GATE_NEED_NODES=1 they fail.
    """
    skip_or_fail(why_no_network(), "GATE_NEED_NODES")
    with contextlib.ExitStack() as held:

        def start(*cables: Any) -> virtual_nodes.VirtualNodes:
            return held.enter_context(virtual_nodes.VirtualNodes(*cables))

        yield start


@pytest.fixture
def new_strategy(comm: MPI.Intracomm) -> Iterator[mpidist.MirroredStrategy]:
    """A strategy over all ranks for one test, which nothing has used before."""
    strategy = mpidist.MirroredStrategy(communicator=comm)
    yield strategy
    strategy.experimental_finalize()


@pytest.fixture(scope="session")
def kept_strategies() -> Iterator[list[mpidist.MirroredStrategy]]:
    """The strategy that the next test takes."""
    kept: list[mpidist.MirroredStrategy] = []
    yield kept
    for strategy in kept:
        strategy.experimental_finalize()


@pytest.fixture
def strategy(
    comm: MPI.Intracomm, kept_strategies: list[mpidist.MirroredStrategy]
) -> Iterator[mpidist.MirroredStrategy]:
    """A strategy over all ranks. The next test has the same, unless it is unusable."""
    if not kept_strategies:
        kept_strategies.append(mpidist.MirroredStrategy(communicator=WORLD))
    (strategy,) = kept_strategies
    yield strategy
    consensus = strategy.extended.consensus
    left = comm.allgather((consensus.is_usable, consensus.progress.digest))
    if set(left) != {(True, 0)}:
        kept_strategies.clear()
        strategy.experimental_finalize()


@pytest.fixture
def make_strategy(
    comm: MPI.Intracomm,
) -> Iterator[Callable[..., mpidist.MirroredStrategy]]:
    """A function that makes strategies over all ranks for one test."""
    made = []

    def make(*arguments: Any, **options: Any) -> mpidist.MirroredStrategy:
        made.append(mpidist.MirroredStrategy(*arguments, communicator=comm, **options))
        return made[-1]

    yield make
    for strategy in reversed(made):
        strategy.experimental_finalize()


@pytest.fixture
def read_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """No read is so short that it is not left to a thread, but the first."""
    monkeypatch.setattr(reader, "_SHORT_SECONDS", -1.0)


@pytest.fixture
def mpirun(
    request: pytest.FixtureRequest,
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A function that runs a Python script under mpirun, and returns how it ended.

    In a test that takes `comm` too, it runs once for all ranks. Others are divided
    between the ranks, as most of such a job's time is waiting.

    `mpirun(ranks, "script.py", "argument", VARIABLE="value")`; a script is a path, or
    the text of one if it holds a newline. `options` are mpirun's. The job has to end
    well, or in an error if it `fails`; either will do if that is None.
    """
    together = "comm" in request.fixturenames
    comm = request.getfixturevalue("comm") if together else MPI.COMM_SELF

    def start(
        ranks: int,
        script: str,
        *arguments: str,
        options: Sequence[str] = (),
        fails: bool | None = False,
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
        wait_patiently(comm.Ibarrier())
        result = comm.bcast(result)
        if isinstance(result, AssertionError):
            raise result
        is_expected = fails in (None, result.returncode != 0)
        assert is_expected, f"{result.returncode}: {result.stdout}\n{result.stderr}"
        return result

    return start
