"""Jobs under a real Slurm: launchers, the scripts in jobs/, signals, pre-emption."""

import os
import re
import shutil
import sys
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

from mpidist.launch.allocations import expand_hosts

ROOT = Path(__file__).parents[2]
IS_OPEN_MPI = "Open MPI" in MPI.Get_library_version()
PROTOCOL = "pmix" if IS_OPEN_MPI else "pmi2"
# The script for this MPI, the one for the other, and the one for any
WITH_SRUN, WITH_OTHER = (
    ("train_openmpi.sbatch", "train.sbatch")
    if IS_OPEN_MPI
    else ("train.sbatch", "train_openmpi.sbatch")
)
WITH_MPIRUN = "train_mpirun.sbatch"
RANKS = range(4)
TWO_NODES = ("--nodes=2", "--ntasks-per-node=2")

WHO = """
import os
import mpidist

strategy = mpidist.MirroredStrategy()
topology = strategy.extended.topology
resolver = strategy.cluster_resolver
print(
    f"rank={topology.rank} of={topology.size} local={topology.local_rank} "
    f"nodes={topology.size // topology.node.size} "
    f"gpus={os.environ.get('CUDA_VISIBLE_DEVICES')} "
    f"address={resolver and resolver.master()};",
    flush=True,
)
"""


def who(text):
    """Return what the ranks printed, in their order; lines may have been joined."""
    found = [
        dict(re.findall(r"(\w+)=([^\s;]+)", f"rank={part}"))
        for part in text.split("rank=")[1:]
    ]
    return sorted(found, key=lambda fields: fields["rank"])


ELASTIC = """
import os, signal
import mpidist
from mpi4py import MPI

def train(strategy):
    for step in range(10):
        size = strategy.num_replicas_in_sync
        if step == 5 and MPI.COMM_WORLD.rank == 2 and size == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        total = strategy.reduce("SUM", MPI.COMM_WORLD.rank)
    print(f"{size} replicas, sum {total};", flush=True)

mpidist.run_elastic(train)
"""


def by_mpirun(script, *options):
    """Return a command line; in an allocation mpirun knows how many fit on a node."""
    if IS_OPEN_MPI:  # Slurm is told of more cores than there may be
        options = (*options, "--bind-to", "none")
    mpirun, words = launching.mpirun_command(4)[0], " ".join(options)
    return f"{mpirun} {words} -n 4 {sys.executable} {script}"


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of jobs/ in it, from which jobs are submitted."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    return tmp_path


@pytest.fixture
def submit(slurm, folder):
    """A function that submits a script of jobs/, as it is.

    With `instead`, that runs in place of jobs/train_digits_resumable.py.
    """
    started = []

    def submit(script, *arguments, instead=None):
        if instead is not None:
            shutil.copy(instead, folder / "jobs" / "train_digits_resumable.py")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        job = slurm.submit(f"jobs/{script}", *arguments, cwd=folder, PATH=path)
        started.append(job)
        return job

    yield submit
    for job in started:
        slurm.start(["scancel", "--quiet", job.number])


@pytest.fixture
def submit_stepping(submit):
    """A function that submits a script with a job that goes on until it is warned."""

    def submit_stepping(script, *arguments):
        job = submit(
            script, *arguments, instead=ROOT / "tests" / "jobs" / "slurm_job.py"
        )
        job.wait_for_output("is ready in run 0", len(RANKS))
        return job

    return submit_stepping


def require_second_run(job):
    """Wait for the end of a job, and fail unless it ended well in its second run."""
    ended = job.wait()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.output
    assert job.output.count("is ready in run 1") == len(RANKS), job.output


@pytest.mark.parametrize("protocol", ["none", "pmi2", "pmix", "cray_shasta"])
def test_srun_makes_one_world_or_is_refused_by_name(slurm, protocol):
    ended = slurm.srun(*TWO_NODES, f"--mpi={protocol}", sys.executable, "-c", WHO)
    if protocol == PROTOCOL:
        assert ended.returncode == 0, ended.stderr
        ranks = who(ended.stdout)
        assert [fields["of"] for fields in ranks] == ["4"] * 4
        assert [fields["local"] for fields in ranks] == ["0", "1", "0", "1"]
        assert [fields["address"].removeprefix("grpc://") for fields in ranks] == [
            f"{node}:{port}" for node in ("node1", "node2") for port in (8888, 8889)
        ]
    else:
        assert ended.returncode != 0
        assert ended.stdout == ""
        assert "mpidist.errors.LaunchError: srun started 4 processes" in ended.stderr
        assert f"'srun --mpi={PROTOCOL} python " in ended.stderr


@pytest.mark.parametrize("protocol", [PROTOCOL, "none"])
def test_the_doctor_under_srun(slurm, protocol):
    doctor = [sys.executable, "-m", "mpidist", "doctor"]
    ended = slurm.srun(*TWO_NODES, f"--mpi={protocol}", *doctor)
    if protocol == PROTOCOL:
        assert ended.returncode == 0, ended.stdout
        assert "MPI sees 4" in ended.stdout
        assert "2 nodes" in ended.stdout
    else:
        words = " ".join(ended.stdout.split())
        assert ended.returncode != 0
        assert "FAIL launcher MPI sees 1 process" in words
        assert f"'srun --mpi={PROTOCOL} python -m mpidist doctor'" in words


def test_local_ranks_follow_the_nodes_not_their_numbers(slurm):
    ended = slurm.srun(
        *(*TWO_NODES, "--distribution=cyclic", f"--mpi={PROTOCOL}"),
        *(sys.executable, "-c", WHO),
    )
    assert ended.returncode == 0, ended.stderr
    assert [fields["local"] for fields in who(ended.stdout)] == ["0", "0", "1", "1"]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("default", ["none", "pmix"])  # of the site
def test_mpirun_in_an_allocation_makes_one_world(slurm, folder, nodes, default):
    (folder / "who.py").write_text(WHO)
    job = slurm.submit(
        f"--nodes={nodes}",
        f"--ntasks-per-node={4 // nodes}",
        f"--wrap={by_mpirun('who.py')}",
        cwd=folder,
        SLURM_MPI_TYPE=default,
    )
    assert job.wait()["JobState"] == "COMPLETED", job.output
    ranks = who(job.output)
    assert [fields["of"] for fields in ranks] == ["4"] * 4
    local = [str(i % (4 // nodes)) for i in RANKS]
    assert [fields["local"] for fields in ranks] == local
    assert {fields["nodes"] for fields in ranks} == {str(nodes)}
    # Slurm's variables describe mpirun's daemons, so nothing is told from them
    assert {fields["address"] for fields in ranks} == {"None"}


@pytest.mark.parametrize("launcher", ["mpirun", "auto"])
def test_mpidist_run_in_an_allocation(slurm, folder, launcher):
    (folder / "who.py").write_text(WHO)
    own = f"{sys.executable} -m mpidist run --launcher {launcher}"
    job = slurm.submit(
        *TWO_NODES,
        f"--wrap={own} who.py",
        cwd=folder,
        SLURM_MPI_TYPE="none",
    )
    assert job.wait()["JobState"] == "COMPLETED", job.output
    ranks = who(job.output)
    assert [fields["of"] for fields in ranks] == ["4"] * 4
    assert {fields["nodes"] for fields in ranks} == {"2"}
    # Only those of srun know addresses
    is_srun = launcher != "mpirun"
    assert ({fields["address"] for fields in ranks} == {"None"}) != is_srun


def test_mpidist_run_in_a_step_of_a_shell(slurm, folder):
    (folder / "who.py").write_text(WHO)
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2"]
    ended = slurm.srun(
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=4", "--mpi=none"),
        *(*command, str(folder / "who.py")),
    )
    assert ended.returncode == 0, ended.stderr
    assert [fields["of"] for fields in who(ended.stdout)] == ["2"] * 2


@pytest.mark.skipif(not IS_OPEN_MPI, reason="this MPI ends a job in which a rank dies")
def test_others_go_on_without_a_rank_that_died_on_another_node(slurm, folder):
    (folder / "elastic.py").write_text(ELASTIC)
    job = slurm.submit(
        *TWO_NODES,
        f"--wrap={by_mpirun('elastic.py', '--with-ft', 'ulfm')}",
        cwd=folder,
        SLURM_MPI_TYPE="none",
    )
    assert job.wait()["JobState"] == "COMPLETED", job.output
    assert job.output.count("3 replicas, sum 4;") == 3
    assert "rank 2 of 4 died; 3 continue" in job.output


@pytest.mark.parametrize(
    ("option", "srun", "mpirun"),
    [
        # Each rank sees its own; or the node's, and takes that of its local rank
        ("--gpus-per-task=1", ["0", "1"] * 2, ["0" if IS_OPEN_MPI else "0,1"] * 4),
        ("--gres=gpu:2", ["0,1"] * 4, ["0,1"] * 4),
    ],
)
def test_which_gpus_ranks_are_told(slurm, folder, option, srun, mpirun):
    (folder / "who.py").write_text(WHO)
    size = [*TWO_NODES, option]
    ended = slurm.srun(
        *size, f"--mpi={PROTOCOL}", sys.executable, str(folder / "who.py")
    )
    assert [fields["gpus"] for fields in who(ended.stdout)] == srun
    job = slurm.submit(*size, f"--wrap={by_mpirun('who.py')}", cwd=folder)
    job.wait()
    assert [fields["gpus"] for fields in who(job.output)] == mpirun


@pytest.mark.parametrize(
    "text", ["n[1-3],m5,gpu[008,010-012]", "n[9-11]", "r[0-1]n[1-2]", "a,b[1,3-4],c"]
)
def test_lists_of_hosts_are_expanded_as_slurm_does(slurm, text):
    expanded = slurm.run("scontrol", "show", "hostnames", text).split()
    assert expand_hosts(text) == expanded


def test_the_scripts_give_mpiruns_digits(slurm, submit, folder):
    arguments = ["--epochs=3", "--devices=CPU:0"]
    expected = digits_of_mpirun(slurm, folder, arguments)
    for number, script in enumerate((WITH_SRUN, WITH_MPIRUN)):
        job = submit(script, *arguments, "--checkpoint-dir", f"run-{number}")
        assert job.wait()["JobState"] == "COMPLETED", job.output
        assert digits_in(job.output) == expected


@pytest.mark.parametrize("how", ["pre-empted", "warned of the time limit"])
def test_a_job_goes_on_where_it_was(slurm, submit, folder, how):
    """The job by the script for srun; its digits are those of one that ran on."""
    # Many short steps
    arguments = ["--epochs=20", "--shifts=0", "--hidden=128", "--batch-size=64"]
    arguments.append("--devices=CPU:0")
    job = submit(WITH_SRUN, *arguments, "--save-every=10")
    saved = folder / "run"
    job.wait_until(lambda: list(saved.glob("ckpt-*.h5")), "a checkpoint is there")
    if how == "pre-empted":
        urgent = slurm.submit(
            "--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=folder
        )
        assert urgent.wait()["JobState"] == "COMPLETED"
    else:
        slurm.run("scancel", "--signal=USR1", job.number)
    ended = job.wait()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), job.output
    assert digits_in(job.output) == digits_of_mpirun(slurm, folder, arguments)


def digits_of_mpirun(slurm, folder, arguments):
    """Return loss and accuracy that the main job prints under mpirun."""
    command = [*launching.mpirun_command(2), sys.executable, "jobs/train_digits.py"]
    return tuple(slurm.run(*command, *arguments, cwd=folder).split()[:2])


def digits_in(output):
    """Return what the main job has printed, after the bars of progress."""
    found = re.search(r"(loss=\d\.\d{6}) (accuracy=\S+) \S+ ranks=4\n", output)
    assert found is not None, output
    return found.groups()


def test_the_script_for_the_other_mpi_fails_and_names_the_command(submit):
    job = submit(WITH_OTHER)
    assert job.wait()["JobState"] == "FAILED"
    assert f"'srun --mpi={PROTOCOL} python train_digits_resumable.py'" in job.output


@pytest.mark.parametrize("script", [WITH_SRUN, WITH_MPIRUN])
def test_a_rank_that_raises_ends_the_job_with_its_traceback(submit_stepping, script):
    job = submit_stepping(script, "raise")
    ended = job.wait()
    assert ended["JobState"] == "FAILED"
    assert not ended["ExitCode"].startswith("0:")
    assert "mpidist: rank 1 of 4 failed" in job.output
    assert "KeyError: 'the reason'" in job.output
    assert job.output.count("Traceback (most recent call last)") == 1, job.output


@pytest.mark.parametrize("script", [WITH_SRUN, WITH_MPIRUN])
def test_a_rank_that_dies_ends_the_job(submit_stepping, script):
    job = submit_stepping(script, "die")
    assert job.wait()["JobState"] == "FAILED", job.output
    if script == "train.sbatch":  # by pmi2 Slurm hears of it late
        assert "rank 1 of 4 has ended (killed, crashed or by os._exit)" in job.output


def test_a_cancelled_job_ends_and_does_not_come_back(submit_stepping, slurm):
    jobs = [submit_stepping(script) for script in (WITH_SRUN, WITH_MPIRUN)]
    for job in jobs:
        slurm.run("scancel", job.number)
    for job in jobs:
        ended = job.wait()
        assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    slurm.wait_for(lambda: not slurm.run("squeue", "-h"), "no job is left")


def test_jobs_run_again_warned_of_the_time_limit_or_requeued_by_hand(
    submit_stepping, slurm
):
    jobs = [submit_stepping(script) for script in (WITH_SRUN, WITH_MPIRUN)]
    for script, flag in ((WITH_SRUN, ""), (WITH_MPIRUN, "B:")):
        text = (ROOT / "jobs" / script).read_text()
        assert f"#SBATCH --signal={flag}USR1@120" in text
    # As that does when the time comes: to the ranks, and to the script alone
    slurm.run("scancel", "--signal=USR1", jobs[0].number)
    slurm.run("scancel", "--signal=USR1", "--batch", jobs[1].number)
    by_hand = submit_stepping(WITH_SRUN)
    slurm.run("scontrol", "requeue", by_hand.number)
    for job in jobs:
        require_second_run(job)
        assert job.output.count("was warned by SIGUSR1") == len(RANKS), job.output
    require_second_run(by_hand)


def test_a_job_that_is_preempted_runs_again(submit_stepping, slurm, folder):
    jobs = [submit_stepping(script) for script in (WITH_SRUN, WITH_MPIRUN)]
    urgent = slurm.submit(
        "--partition=high", "--nodes=2", "--exclusive", "--wrap=true", cwd=folder
    )
    assert urgent.wait()["JobState"] == "COMPLETED"
    for job in jobs:
        require_second_run(job)
    warned = [job.output.count("was warned by SIGTERM") for job in jobs]
    assert warned[0] == len(RANKS), jobs[0].output
    if not IS_OPEN_MPI:  # whose mpirun takes its ranks along, unwarned
        assert warned[1] == len(RANKS), jobs[1].output
