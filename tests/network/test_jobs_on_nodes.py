"""Jobs over several nodes are right, and find the nodes."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
JOB, MODELS = str(TESTS / "jobs/nodes_job.py"), str(TESTS / "fuzz/job.py")

# Four nodes, and more than four ranks, take long on two cores
CROWDED = [pytest.param(*n, marks=pytest.mark.slow) for n in [(4, 1), (3, 2), (4, 2)]]


@pytest.mark.parametrize(
    ("count", "ranks_per_node"), [(2, 1), (2, 2), (3, 1), *CROWDED]
)
def test_a_job_is_right_on_nodes(network, tmp_path, count, ranks_per_node):
    arguments = [str(count), str(ranks_per_node), str(tmp_path)]
    ended = network(count).mpirun(ranks_per_node, JOB, *arguments)
    assert ended.returncode == 0, ended.stdout
    assert "all is well" in ended.stdout
    assert f"{count * ranks_per_node} replicas on {count} nodes" in ended.stdout


@pytest.mark.parametrize("model", ["calls", "rows"])
def test_a_model_is_right_on_nodes(network, tmp_path, model):
    """Some programs: tests/fuzz/run draws others, on nodes that are pretended."""
    where = {"PYTHONPATH": str(TESTS / "support"), "TMPDIR": str(tmp_path)}
    ended = network(2).mpirun(2, MODELS, model, "--count", "5", **where)
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("seed ") == 5


def test_the_doctor_finds_a_folder_that_nodes_do_not_share(network, tmp_path):
    nodes = network(2)
    nodes[1].hide(tmp_path)
    command = [sys.executable, "-m", "mpidist", "doctor", "--paths", str(tmp_path)]
    ended = nodes.start(1, command).wait()
    words = " ".join(ended.stdout.split())
    assert "2 nodes" in words
    assert "rank 1: does not see the files of rank 0" in words
    assert "mount the same file system on every node" in words
