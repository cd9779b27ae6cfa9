"""The table of launchers: each row, whether it is refused, and who else asks."""

import ast
import dataclasses
import json
import os
import sys
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

import mpidist
from mpidist.launch import launchers
from mpidist.launch.launchers import LAUNCHERS, Launcher, check_launch, find_launcher
from mpidist.launch.starting import Library, Request, start_command

OPEN_MPI, MPICH = "Open MPI v5.0.11, package: x", "MPICH Version:      5.0.2"
TF_CONFIG = {
    "cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1", "d:1"], "ps": ["e:1"]},
    "task": {"type": "worker", "index": 0},
}
# What each sets for rank 1 of 4, which is number 1 on its node
TORCH = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n1"}
STARTED = {
    "torchrun": {**TORCH, "TORCHELASTIC_RUN_ID": "none"},
    "horovodrun": {
        "HOROVOD_RANK": "1",
        "HOROVOD_SIZE": "4",
        "HOROVOD_LOCAL_RANK": "1",
    },
    "a launcher of torch.distributed": TORCH,
    "Lightning": {
        name: text
        for name, text in {**TORCH, "NODE_RANK": "0"}.items()
        if name != "RANK"
    },
    "Open MPI's mpirun": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    },
    "an MPICH-like mpirun": {
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "4",
    },
    "MVAPICH's mpirun": {
        "MV2_COMM_WORLD_RANK": "1",
        "MV2_COMM_WORLD_SIZE": "4",
        "MV2_COMM_WORLD_LOCAL_RANK": "1",
    },
    "jsrun": {
        "JSM_NAMESPACE_RANK": "1",
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
    },
    "mpiexec of PALS": {"PALS_RANKID": "1", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "1"},
    "flux run": {
        "FLUX_TASK_RANK": "1",
        "FLUX_JOB_SIZE": "4",
        "FLUX_TASK_LOCAL_ID": "1",
    },
    "srun": {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"},
    "a launcher of TensorFlow": {"TF_CONFIG": json.dumps(TF_CONFIG)},
}
ROWS = {one.name: one for one in LAUNCHERS if one.processes is not None}
# What each batch system sets in a job of 6 slots on two nodes, and the job's name
JOBS = {
    "flux run": ({"FLUX_JOB_ID": "f7", "FLUX_URI": "local:///x"}, "Flux job f7"),
    "srun": (
        {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_TASKS_PER_NODE": "3(x2)",
        },
        "Slurm job 7",
    ),
    "PBS": ({"PBS_JOBID": "7.server", "PBS_NODEFILE": "lines"}, "PBS job 7.server"),
    "LSF": ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "node1 3 node2 3"}, "LSF job 7"),
    "Grid Engine": (
        {"JOB_ID": "7", "NSLOTS": "6", "PE_HOSTFILE": "slots"},
        "Grid Engine job 7",
    ),
    "the MPI operator of Kubernetes": (
        {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": "hostfile"},
        "",
    ),
}
FILES = {
    "lines": "node1\n" * 3 + "node2\n" * 3,
    "slots": "node1 3 all.q@node1 UNDEFINED\nnode2 3 all.q@node2 UNDEFINED\n",
    "hostfile": "# of the job\nnode1 slots=3\n\nnode2:3\n",
}
SIX = {"node1": 3, "node2": 3}


@pytest.fixture
def in_job(tmp_path):
    """A function that returns the variables of a job of a batch system."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def in_job(name):
        environ, _ = JOBS[name]
        return {k: str(tmp_path / v) if v in FILES else v for k, v in environ.items()}

    return in_job


def test_each_launcher_is_tried():
    assert set(STARTED) == set(ROWS)
    assert set(JOBS) == {one.name for one in LAUNCHERS if one.job is not None}


def test_a_row_without_a_field_is_an_error():
    fields = {
        f.name: getattr(launchers.SRUN, f.name) for f in dataclasses.fields(Launcher)
    }
    for name in fields:
        with pytest.raises(TypeError, match=name):
            Launcher(**{k: v for k, v in fields.items() if k != name})


@pytest.mark.parametrize("name", STARTED)
@pytest.mark.parametrize("library", [OPEN_MPI, MPICH])
def test_separate_processes_are_refused_by_name(name, library):
    environ = STARTED[name]
    started = find_launcher(environ)
    assert started.launcher.name == name
    assert started.processes == 4
    assert started.rank == (None if name == "Lightning" else 1)
    assert launchers.is_silent(environ) == (name != "Lightning")
    if ROWS[name].is_mpi:
        assert launchers.find_local_rank(environ) == 1
        kept = launchers.environ_of_another_job({**environ, "HOME": "/"})
        assert find_launcher(kept) is None
        assert kept["HOME"] == "/"
    with pytest.raises(mpidist.LaunchError) as caught:
        check_launch(environ, 1, library)
    text, protocol = str(caught.value), "pmix" if library == OPEN_MPI else "pmi2"
    assert f"{name} started 4 processes (" in text
    of_flux = "pmix" if library == OPEN_MPI else "simple"
    command = {
        "srun": f"'srun --mpi={protocol} python ",
        "flux run": f"'flux run -o pmi={of_flux} -n 4 python ",
    }
    assert command.get(name, "mpirun -n 4 python ") in text
    check_launch(environ, 4, library)
    check_launch({**environ, "MPIDIST_ALLOW_SINGLETON": "1"}, 1, library)
    one = {key: "1" if text == "4" else text for key, text in environ.items()}
    if name != "a launcher of TensorFlow":
        check_launch(one, 1, library)


@pytest.mark.parametrize("outer", ["srun", "an MPICH-like mpirun", "flux run"])
def test_the_inner_launcher_counts(outer):
    """Each node's one torchrun was started by srun; mpirun's daemons, too."""
    one = {k: "1" if text == "4" else text for k, text in STARTED[outer].items()}
    with pytest.raises(mpidist.LaunchError, match="torchrun started 4"):
        check_launch({**one, **STARTED["torchrun"]}, 1, MPICH)
    alone = {**STARTED["torchrun"], "WORLD_SIZE": "1"}
    with pytest.raises(mpidist.LaunchError, match=f"{outer} started 4"):
        check_launch({**STARTED[outer], **alone}, 1, MPICH)
    by_mpirun = {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}
    check_launch({**STARTED[outer], **by_mpirun}, 1, OPEN_MPI)


@pytest.mark.parametrize(
    ("text", "processes"),
    [
        ("", None),
        ("{", None),
        ("[" * 100_000, None),
        ("[]", None),
        ("{}", None),
        ('{"cluster": {"worker": ["a:1"]}}', None),
        ('{"cluster": {"worker": ["a:1", "b:1"]}}', 2),
        ('{"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {}}', 2),
        (json.dumps({**TF_CONFIG, "task": {"type": "evaluator", "index": 0}}), None),
        (json.dumps({**TF_CONFIG, "task": {"type": "worker", "index": "2"}}), 4),
        (json.dumps({**TF_CONFIG, "task": {"type": "worker", "index": "x"}}), None),
    ],
)
def test_tensorflows_variable(text, processes):
    started = find_launcher({"TF_CONFIG": text})
    assert (started and started.processes) == processes


@pytest.mark.parametrize("name", JOBS)
def test_a_job_of_two_nodes(name, in_job, tmp_path):
    """Only the launcher knows the cores of other nodes; its slots are the default."""
    environ = in_job(name)
    launcher = launchers.find_job(environ)
    assert launcher.name == name
    assert launchers.describe_job(environ) == JOBS[name][1]
    is_known = name != "flux run"
    assert launcher.job.hosts(environ) == (SIX if is_known else {})
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text("#!/bin/sh\necho HYDRA\n")
    mpirun.chmod(0o755)
    library = Library(MPICH, tmp_path / "lib" / "libmpi.so")
    many = 10 * (os.cpu_count() or 1)
    for ranks in (many, *([None] if is_known else [])):
        request = Request(["x"], ranks, launcher="mpirun")
        command, notes = start_command(request, library, environ)
        assert command[1:] == ["-n", str(ranks or 6), "x"]
        assert notes == []


@pytest.mark.parametrize("name", JOBS)
def test_a_job_whose_files_cannot_be_read(name, in_job):
    environ = {k: "/none/x" if "/" in v else v for k, v in in_job(name).items()}
    assert launchers.find_job(environ).job.hosts(environ) in ({}, SIX)


def test_one_node_of_a_batch_system_is_counted_like_this_one(tmp_path):
    (tmp_path / "nodes").write_text(f"{os.uname().nodename}\n" * 2)
    environ = {"PBS_JOBID": "7", "PBS_NODEFILE": str(tmp_path / "nodes")}
    assert launchers.find_job(environ).job.hosts(environ) == {os.uname().nodename: 2}
    many = 10 * (os.cpu_count() or 1)
    words = [sys.executable, "-m", "mpidist", "run", "-n", str(many), "--dry-run", "sh"]
    assert "would wait for each other" in launching.run(words, **environ).stderr
    hosts = ["--launcher-options=-machinefile hosts", "sh"]
    for ended in (
        launching.run([*words[:-1], *hosts], **environ),
        launching.run([*words[:-1], *hosts]),
    ):
        assert f"-n {many} sh" in ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("environ", "signals"),
    [
        ({}, "SIGTERM SIGUSR1"),
        ({"SLURM_JOB_ID": "7"}, "SIGTERM SIGUSR1"),
        ({"LSB_JOBID": "7"}, "SIGTERM SIGUSR1 SIGUSR2"),
        ({"JOB_ID": "7", "NSLOTS": "2"}, "SIGTERM SIGUSR1 SIGUSR2"),
    ],
)
def test_the_signals_that_announce_the_end(environ, signals):
    assert [s.name for s in launchers.end_signals(environ)] == signals.split()


@pytest.mark.parametrize(
    "communicator",
    ["", pytest.param("communicator=MPI.COMM_WORLD", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ["torchrun", "flux run", "a launcher of TensorFlow"])
def test_each_process_says_why_it_ends(name, communicator):
    """Launchers that are not MPI's may show the output of one process only."""
    code = "import mpidist; from mpi4py import MPI; print('here')\n"
    code += f"mpidist.MirroredStrategy({communicator}); print('computing')"
    one = f'{sys.executable} -c "{code}" & '
    ended = launching.run(["sh", "-c", 2 * one + "wait"], **STARTED[name])
    assert ended.stdout.split() == ["here", "here"]
    is_each = not ROWS[name].is_mpi
    assert ended.stderr.count(f"LaunchError: {name} started 4") == 1 + is_each


def test_no_other_module_asks_for_the_variables():
    """What differs between launchers stands in the table."""
    prefixes = ("SLURM_", "PMI_", "OMPI_COMM", "PBS_", "LSB_", "FLUX_", "PALS_")
    prefixes += ("HOROVOD_", "TORCHELASTIC", "TF_CONFIG", "MPI_LOCAL", "PMIX_RANK")
    room = Path(launchers.__file__).parent
    known = {room / f"{name}.py" for name in ("launchers", "allocations", "slurm")}
    for path in set(room.parent.rglob("*.py")) - known:
        for node in ast.walk(ast.parse(path.read_text())):
            text = getattr(node, "value", None)
            assert not (isinstance(text, str) and text.startswith(prefixes)), path


def test_the_library_of_this_process_has_a_protocol():
    version = MPI.Get_library_version()
    assert launchers.protocol_of(version) == ("pmix" if "Open" in version else "pmi2")
