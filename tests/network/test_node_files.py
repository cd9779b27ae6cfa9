"""Folders that one node does not see: the job says which, and on what rank."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import virtual_nodes
from mpi4py import MPI

from mpidist.comm.transports.tuning import Layout, short_name, write_table

JOB = str(Path(__file__).parents[1] / "jobs" / "node_files_job.py")
ROUTES = """
import sys
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
found = strategy.gather_objects(str(strategy.extended.collectives.transports.table))
assert len(set(found)) == 1, found
if strategy.extended.replica_id == 0:
    sys.stdout.write(found[0])
"""


ERRORS = {
    "read": r"DataError: {}/data\.h5: .* on rank [23]: .*No such file",
    "save": r"CheckpointError: {}/run: rank 2 on node1 does not see",
    "save in background": r"CheckpointError: {}/run: rank 2 on node1 does not see",
    "restore": r"CheckpointError: {}/run: rank 2 on node1 does not see",
    "write": r"DataError: {}: rank 0 does not see .* which rank 2 wrote",
}


def test_a_folder_that_a_node_does_not_see_is_named(network, tmp_path):
    """In all jobs at the same time, as they wait for what may appear late."""
    nodes = network(2)
    ended = nodes.mpirun(2, JOB, str(tmp_path), "prepare")
    assert "[]" in ended.stdout, ended.stdout
    nodes[1].hide(tmp_path)
    with ThreadPoolExecutor(len(ERRORS)) as pool:
        folder = str(tmp_path)
        jobs = {
            kind: pool.submit(nodes.mpirun, 2, JOB, folder, kind) for kind in ERRORS
        }
    for kind, error in ERRORS.items():
        ended = jobs[kind].result()
        assert ended.returncode == 0, ended.stdout
        expected = r"\[" + error.replace("{}", re.escape(str(tmp_path)))
        assert re.search(expected, ended.stdout), (kind, ended.stdout)


def test_what_every_node_sees_is_no_error(network, tmp_path):
    kinds = ["prepare", *ERRORS]
    ended = network(2).mpirun(1, JOB, str(tmp_path), *kinds)
    assert ended.stdout.count("[]") == len(kinds), ended.stdout
    assert not list(tmp_path.rglob("*.tmp")), "files are left"


@pytest.mark.skipif(not virtual_nodes.can_delay_names(), reason="needs bindfs, FUSE")
@pytest.mark.parametrize("late", [[0], [1], [0, 1]])
def test_names_that_appear_late_are_waited_for(network, tmp_path, late):
    """As on NFS, where a node remembers for seconds that a file was not there."""
    nodes = network(2)
    for number in late:
        nodes[number].delay_names(tmp_path, 2)
    kinds = ["begin", "prepare", "restore", "read", "write", "read rows", "save"]
    kinds += ["restore", "save in background", "save in background", "restore"]
    ended = nodes.mpirun(1, JOB, str(tmp_path), *kinds)
    assert ended.stdout.count("[]") == len(kinds), ended.stdout


def test_all_ranks_follow_the_table_in_the_home_of_rank_0(network, tmp_path):
    """So that it may be on one node alone."""
    layout = Layout(short_name(MPI.Get_library_version()), (1, 1), "CPU")
    rows = {
        "allreduce": [(0, "mpi"), (7, "ordered")],
        "allgatherv": [(0, "mpi")],
        "broadcast": [(0, "mpi")],
    }
    home = tmp_path / "home"
    write_table(home / ".config" / "mpidist" / "transports.json", layout, rows, {})
    nodes = network(2)
    nodes[1].hide(tmp_path)
    ended = nodes.mpirun(1, ROUTES, HOME=str(home), XDG_CONFIG_HOME="")
    assert ended.returncode == 0, ended.stdout
    assert str(rows) in ended.stdout
