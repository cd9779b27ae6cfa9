"""Cables that are cut, for a while and for good, and nodes that are lost."""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import launching
import pytest

JOB = Path(__file__).parents[1] / "jobs" / "node_faults_job.py"
NODES = 3
# The start of a job on a busy machine takes less
HANG_SECONDS = "20"
# What is left behind of MPI's own where processes are ended by force
OF_MPI = re.compile("mpich_shm|sm_seg|vader|ompi|prte|pmix")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to node 1 while a job is at work.

    Args:
      kind: what the job does, see `JOB`.
      is_lost: whether the node is lost, or its cable cut.
      call: what the others wait in.
      options: of mpirun.
      ranks: of a node.
    """

    kind: str
    is_lost: bool
    call: str = "reduce"
    options: tuple[str, ...] = ()
    ranks: int = 1


FAULTS = {
    "a cable cut": Fault("collective", is_lost=False),
    "a node lost in a collective": Fault("collective", is_lost=True),
    "a node of two ranks lost": Fault("collective", is_lost=True, ranks=2),
    "a node lost in input": Fault("input", is_lost=True),
    "a node lost in a checkpoint": Fault(
        "checkpoint", is_lost=True, call=r"CheckpointManager\.save|reduce"
    ),
}
if launching.is_open_mpi():  # the rank's launcher is lost with it
    FAULTS["a node lost in run_elastic"] = Fault(
        "elastic", is_lost=True, options=("--with-ft", "ulfm")
    )


def outcome(network, fault, folder):
    """Return how the job of a fault ends, and files left on the nodes that run."""
    folder.mkdir()
    nodes = network(NODES)
    command = [sys.executable, str(JOB), fault.kind, str(folder)]
    limit = {"MPIDIST_HANG_SECONDS": HANG_SECONDS}
    job = nodes.start(fault.ranks, command, fault.options, **limit)
    job.wait_for("a step", 3)
    if fault.is_lost:
        nodes.lose(1)
    else:
        nodes.cut(1)
    ended = job.wait()
    for node in nodes.running:
        node.wait_until_idle()
    files = [n for node in nodes.running for n in node.shared_memory]
    files += [n for node in nodes.running for n in node.temporary_files]
    return ended, [name for name in files if not OF_MPI.search(name)]


def test_jobs_end_with_a_name_and_leave_nothing(network, tmp_path):
    """All at the same time, as they mostly wait."""
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        started = {
            name: pool.submit(outcome, network, fault, tmp_path / name)
            for name, fault in FAULTS.items()
        }
    for name, fault in FAULTS.items():
        ended, files = started[name].result()
        assert ended.returncode != 0, (name, ended.stdout)
        lost = "rank 1" if fault.ranks == 1 else "ranks 2, 3"
        said = (
            rf"rank \d of {NODES * fault.ranks} has waited .* in ({fault.call}) "
            rf"\(call .*{JOB.name}.*: {lost} (did not arrive|no longer answered)"
        )
        assert re.search(said, ended.stdout), (name, ended.stdout)
        assert files == [], name


def test_a_job_goes_on_when_a_cable_is_mended(network, tmp_path):
    nodes = network(NODES)
    job = nodes.start(1, [sys.executable, str(JOB), "collective", str(tmp_path)])
    job.wait_for("a step", 3)
    nodes.cut(1)
    time.sleep(2.0)  # so long it is cut
    nodes.mend(1)
    job.wait_for("a step", job.output.count("a step") + 3)
    (tmp_path / "enough").touch()
    ended = job.wait()
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count(f"of {NODES} ends well") == NODES, ended.stdout
    for node in nodes.nodes:
        node.wait_until_idle()
        assert node.shared_memory == node.temporary_files == []


@pytest.mark.skipif(not launching.is_open_mpi(), reason="this MPI ends the job")
def test_the_others_go_on_when_all_ranks_of_a_node_die(network, tmp_path):
    """The node lives, and with it the daemon that has started the ranks."""
    nodes = network(NODES)
    command = [sys.executable, str(JOB), "elastic", str(tmp_path)]
    job = nodes.start(2, command, ("--with-ft", "ulfm"))
    job.wait_for("a step", 3)
    nodes[1].kill(f"{sys.executable} {JOB}")
    job.wait_for("a step", job.output.count("a step") + 100)
    (tmp_path / "enough").touch()
    ended = job.wait()
    assert ended.stdout.count("of 4 ends well") == 4, ended.stdout
    for node in nodes.nodes:
        node.wait_until_idle()
