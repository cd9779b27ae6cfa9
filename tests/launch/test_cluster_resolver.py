"""Addresses of ranks from Slurm's variables: TensorFlow's answers, and refusals."""

import contextlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.launch.allocations import expand_hosts, expand_tasks
from mpidist.launch.slurm import SlurmClusterResolver, below_srun

HOSTS = "t02n13,t02n41,t02n43"
ONE_EACH = {"STEP_NUM_TASKS": "3", "STEP_TASKS_PER_NODE": "1(x3)"}
TWO_TWO_ONE = {"STEP_NUM_TASKS": "5", "STEP_TASKS_PER_NODE": "2(x2),1"}


@pytest.fixture
def slurm_step(monkeypatch):
    """A function that sets variables of a step; no others of Slurm's are set."""
    for name in list(os.environ):
        if name.startswith("SLURM_") or name == "CUDA_VISIBLE_DEVICES":
            monkeypatch.delenv(name)

    def set_variables(visible=None, **variables):
        for name, text in {"STEP_NODELIST": HOSTS, **variables}.items():
            monkeypatch.setenv(f"SLURM_{name}", text)
        # Set and taken back, so that what a test leaves in it is taken back too
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")

    return set_variables


LISTS = {
    "n1": "n1",
    "n[1-2],m5,o[3-4,6,7-9]": "n1 n2 m5 o3 o4 o6 o7 o8 o9",
    "n[0001-0003],m5,o[009-011]": "n0001 n0002 n0003 m5 o009 o010 o011",
    "n[9-10]-ib": "n9-ib n10-ib",
    "r[1-2]n[08-09]": "r1n08 r1n09 r2n08 r2n09",
}
NO_HOSTS = [
    "",
    "n[",
    "n[1-",
    "n]1",
    "n[a]",
    "n[1-2-3]",
    "n[]",
    "n[3-1]",
    "n[0-9999999]",
]
NO_TASKS = ["", "2(x", "2,,1", "-1", "2(x99999999)", "two"]


def test_lists_of_hosts_and_tasks():
    for text, hosts in LISTS.items():
        assert expand_hosts(text) == hosts.split()
    assert expand_tasks("3(x2),2,11(x4)") == [3, 3, 2, 11, 11, 11, 11]
    for text in NO_HOSTS:
        with pytest.raises(mpidist.LaunchError, match="not a list of hosts"):
            expand_hosts(text)
    for text in NO_TASKS:
        with pytest.raises(mpidist.LaunchError, match="not a list of tasks"):
            expand_tasks(text)


@given(st.text(alphabet="n019[]-,(x) ", max_size=20))
def test_any_text_is_expanded_or_refused(text):
    for expand in (expand_hosts, expand_tasks):
        with contextlib.suppress(mpidist.LaunchError):
            assert expand(text)


def test_all_is_found_in_the_variables(slurm_step):
    slurm_step("0", PROCID="0", **ONE_EACH)
    resolver = SlurmClusterResolver()
    assert resolver.get_task_info() == (None, None)
    assert resolver.master() == ""
    spec = resolver.cluster_spec()
    assert spec == {"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888"]}
    assert resolver.get_task_info() == ("worker", 0)
    assert resolver.master("worker", 0, rpc_layer="grpc") == "grpc://t02n13:8888"
    assert resolver.num_accelerators() == {"GPU": 1}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
    assert resolver.environment == ""
    assert resolver.rpc_layer == "grpc"


@pytest.mark.parametrize("tasks_per_node", [1, dict.fromkeys(HOSTS.split(","), 1)])
def test_two_jobs(slurm_step, tasks_per_node):
    slurm_step(PROCID="0", STEP_NUM_TASKS="3")
    resolver = SlurmClusterResolver(
        {"worker": 2, "ps": 1},
        port_base=9000,
        tasks_per_node=tasks_per_node,
        gpus_per_node=1,
        gpus_per_task=1,
        auto_set_gpu=False,
    )
    spec = resolver.cluster_spec()
    assert spec == {"ps": ["t02n13:9000"], "worker": ["t02n41:9000", "t02n43:9000"]}
    assert resolver.get_task_info() == ("ps", 0)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    resolver.task_type, resolver.task_id = "worker", 1
    # As in TensorFlow, to ask for the cluster is to find out which task this is
    assert resolver.master() == "grpc://t02n43:9000"
    resolver.rpc_layer = None
    assert resolver.master("ps", 0) == "t02n13:9000"
    assert resolver.master("ps", 0, rpc_layer="test") == "test://t02n13:9000"


ON_NODE = {"GPUS_ON_NODE": "2"}


@pytest.mark.parametrize(
    ("rank", "visible", "more", "options", "share"),
    [
        ("1", "", {}, {"gpus_per_node": 2, "gpus_per_task": 1}, "1"),
        ("1", "", {}, {"gpus_per_node": 4, "gpus_per_task": 2}, "2,3"),
        ("1", "", {}, {"gpus_per_node": 4}, "2,3"),
        ("3", "4,6", ON_NODE, {}, "6"),  # of those that the job was given
        ("1", "1", ON_NODE, {}, "1"),  # Slurm bound it
        ("1", None, {}, {}, None),  # there is none
    ],
)
def test_a_nodes_gpus_are_shared_out(slurm_step, rank, visible, more, options, share):
    slurm_step(visible, PROCID=rank, **TWO_TWO_ONE, **more)
    resolver = SlurmClusterResolver({"ps": 1, "worker": 4}, **options)
    assert resolver.cluster_spec() == {
        "ps": ["t02n13:8888"],
        "worker": ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"],
    }
    for _ in range(2):  # to ask again changes nothing
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == share
        resolver.cluster_spec()
    assert resolver.num_accelerators() == {"GPU": len(share.split(",")) if share else 0}


def test_ranks_are_on_the_hosts_in_slurms_order(slurm_step):
    slurm_step(PROCID="1", STEP_NODELIST="n[9-10]", STEP_NUM_TASKS="2")
    resolver = SlurmClusterResolver(tasks_per_node=1)
    assert resolver.cluster_spec()["worker"] == ["n9:8888", "n10:8888"]
    assert resolver.master() == "grpc://n10:8888"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"jobs": {"worker": 4}}, "4 tasks, but Slurm started 5"),
        ({"gpus_per_node": 1, "gpus_per_task": 1}, "need more than the 1"),
        ({"tasks_per_node": 2}, "5 tasks, but Slurm started 6"),
        ({"jobs": {"worker": 1}, "tasks_per_node": {"n": 1}}, "not one of the 1 tasks"),
        ({"jobs": {}, "tasks_per_node": {}}, "not one of the 0 tasks"),
    ],
)
def test_more_than_there_is_is_refused(slurm_step, options, words):
    slurm_step(PROCID="1", **TWO_TWO_ONE)
    with pytest.raises(RuntimeError, match=words):
        SlurmClusterResolver(**options)


@pytest.mark.parametrize("missing", ["PROCID", "STEP_NUM_TASKS", "STEP_NODELIST"])
def test_outside_of_slurm_it_says_so(slurm_step, monkeypatch, missing):
    slurm_step(PROCID="1", **TWO_TWO_ONE)
    monkeypatch.delenv(f"SLURM_{missing}")
    with pytest.raises(RuntimeError, match=f"SLURM_{missing} is not set"):
        SlurmClusterResolver()


def test_a_spec_is_a_dict_with_tensorflows_methods(slurm_step):
    slurm_step(PROCID="1", **TWO_TWO_ONE)
    spec = SlurmClusterResolver({"ps": 1, "worker": 4}).cluster_spec()
    assert json.loads(json.dumps(spec)) == spec.as_dict() == spec
    assert spec.jobs == ["ps", "worker"]
    assert spec.num_tasks("worker") == 4
    assert spec.task_indices("worker") == [0, 1, 2, 3]
    assert spec.task_address("worker", 3) == "t02n43:8888"
    assert spec.job_tasks("ps") == ["t02n13:8888"]
    with pytest.raises(ValueError, match="no job 'chief', only"):
        spec.job_tasks("chief")
    with pytest.raises(ValueError, match="tasks 0 to 3, not 4"):
        spec.task_address("worker", 4)


def test_a_strategy_has_a_resolver_if_srun_started_its_ranks(slurm_step, monkeypatch):
    for name in ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    slurm_step()
    assert below_srun(1, 5) is None
    slurm_step(PROCID="1", **TWO_TWO_ONE)
    assert below_srun(1, 5).get_task_info() == ("worker", 1)
    assert below_srun(0, 5) is None
    assert below_srun(1, 4) is None
    for name, text in {"LOCALNRANKS": "5", "SIZE": "5", "RANK": "1"}.items():
        monkeypatch.setenv(f"{'MPI' if 'N' in name else 'PMI'}_{name}", text)
    assert below_srun(1, 5) is None
