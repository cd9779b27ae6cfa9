"""Which launcher starts a job: the MPI library's own mpirun, or srun."""

import os
import shlex
import shutil
import sys
from pathlib import Path

import launching
import pytest
from mpi4py import MPI

import mpidist
from mpidist.launch import starting
from mpidist.launch.starting import Library, Request, program, start_command

PYTHON = sys.executable
OPEN_MPI = Library("Open MPI v5.0.7, package: x", Path("/nowhere/lib/libmpi.so.40"))
MPICH = Library("MPICH Version:      4.2.3\nMPICH Release", Path("/nowhere/libmpi.so"))
VERSIONS = {
    "Open MPI": "mpirun (Open MPI) 5.0.7",
    "prterun": "prterun (PRRTE) 3.0.8",
    "MPICH": "HYDRA build details:\n    Version: 4.2.3",
    "Intel": "Intel(R) MPI Library for Linux* OS, Version 2021.17",
}


def make(path, text):
    """Make a program that prints a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder whose programs are the only ones on the path, but `sh` and `cat`."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("sh", "cat"):
        (tmp_path / name).symlink_to(shutil.which(name, path="/bin:/usr/bin"))
    monkeypatch.setattr(starting, "_count_cores", lambda is_whole: 4)
    return tmp_path


def test_the_library_is_the_one_that_this_process_has():
    found = starting.find_library()
    assert found.version == MPI.Get_library_version()
    assert found.path is not None
    assert found.path.exists()
    assert found.family in MPI.Get_library_version()


def test_what_else_is_printed_does_not_matter(folder, tmp_path, monkeypatch):
    """By packages that are imported at the start; and not in this locale's encoding."""
    noise = "import atexit\natexit.register(print, 'bye')\nprint('hello')\n"
    monkeypatch.setattr(starting, "_ASK", noise + starting._ASK)
    assert starting.find_library().version == MPI.Get_library_version()
    program = folder / "bin" / "mpirun"
    make(program, VERSIONS["MPICH"])
    program.write_bytes(program.read_bytes().replace(b"HYDRA", b"\xe9\n$LC_ALL HYDRA"))
    library = MPICH._replace(path=folder / "lib" / "libmpi.so")
    assert start_command(Request(["x"], 2), library, {})[0][0] == str(program)


def test_without_a_library_it_is_said(monkeypatch):
    monkeypatch.setattr(
        starting, "_ASK", "raise RuntimeError('cannot load MPI library')"
    )
    with pytest.raises(mpidist.LaunchError, match="cannot load MPI library"):
        starting.find_library()


def test_a_library_that_crashes_is_no_crash(monkeypatch):
    monkeypatch.setattr(starting, "_ASK", "import os; os.abort()")
    with pytest.raises(mpidist.LaunchError, match="mpi4py finds no MPI library"):
        starting.find_library()


@pytest.mark.parametrize("family", ["Open MPI", "MPICH"])
def test_the_mpirun_of_another_library_is_passed_over(folder, family):
    """Whichever comes first on the path, and beside the library first of all."""
    library = OPEN_MPI if family == "Open MPI" else MPICH
    other = "MPICH" if family == "Open MPI" else "Open MPI"
    make(folder / "mpirun", VERSIONS[other])
    with pytest.raises(mpidist.LaunchError, match=f"no mpirun of {family}.*but only"):
        start_command(Request(["x"], 2), library, {})
    make(folder / "mpiexec", VERSIONS[family])
    command, notes = start_command(Request(["x"], 2), library, {})
    assert (command[0], notes) == (str(folder / "mpiexec"), [])
    own = folder / "prefix" / "bin" / "mpirun"
    make(own, VERSIONS["prterun" if family == "Open MPI" else family])
    beside = library._replace(path=folder / "prefix" / "lib" / "x" / "libmpi.so")
    command, _ = start_command(Request(["x"], 2), beside, {})
    assert command[0] == str(own)


def test_no_mpirun_at_all_is_named(folder):
    with pytest.raises(mpidist.LaunchError, match="no mpirun of MPICH Version"):
        start_command(Request(["x"], 2), MPICH, {})


def test_crowds_are_refused_unless_asked_for(folder):
    make(folder / "mpirun", VERSIONS["Open MPI"])
    with pytest.raises(
        mpidist.LaunchError, match=r"5 ranks on 4 cores.*start 4, or pass"
    ):
        start_command(Request(["x"], 5), OPEN_MPI, {})
    command, notes = start_command(Request(["x"], 5, True), OPEN_MPI, {})
    assert "--oversubscribe" in command
    assert notes == ["oversubscribed: 5 ranks share 4 cores"]
    command, notes = start_command(Request(["x"], 4), OPEN_MPI, {})
    assert ("--oversubscribe" in command, notes) == (False, [])
    # Of other hosts nothing is known
    command, _ = start_command(Request(["x"], 9, options=["--host=a,b"]), OPEN_MPI, {})
    assert command[-4:] == ["--host=a,b", "-n", "9", "x"]


@pytest.mark.parametrize("user", [0, 1000])
def test_what_open_mpi_needs(folder, monkeypatch, user):
    """As root it refuses; to other nodes it hands no variables."""
    monkeypatch.setattr(os, "geteuid", lambda: user)
    make(folder / "mpirun", VERSIONS["Open MPI"])
    environ = {"MPIDIST_LOG": "debug", "MPIDIST_BANNER": "0", "OTHER": "1"}
    command, _ = start_command(Request(["a", "b c"], 2), OPEN_MPI, environ)
    root = ["--allow-run-as-root"] if user == 0 else []
    variables = ["-x", "MPIDIST_BANNER", "-x", "MPIDIST_LOG"]
    assert command[1:] == [*root, *variables, "-n", "2", "a", "b c"]
    make(folder / "mpirun", VERSIONS["MPICH"])
    assert start_command(Request(["a"], 2), MPICH, environ)[0][1:] == ["-n", "2", "a"]


def test_the_number_of_ranks_must_be_said(folder):
    make(folder / "mpirun", VERSIONS["MPICH"])
    with pytest.raises(mpidist.LaunchError, match="number of ranks"):
        start_command(Request(["x"], None), MPICH, {})


IN_SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_NTASKS": "6"}


def test_srun_within_an_allocation(folder):
    make(folder / "srun", "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix_v4")
    command, notes = start_command(Request(["x"], None), MPICH, IN_SLURM)
    assert (command, notes) == (["srun", "--mpi=pmi2", "x"], [])
    command, _ = start_command(Request(["x"], 3, True), OPEN_MPI, IN_SLURM)
    assert command == ["srun", "--mpi=pmix", "-n", "3", "--overcommit", "x"]
    # In an interactive step of one process
    inside = {**IN_SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    assert "--overlap" in start_command(Request(["x"], 3), MPICH, inside)[0]


@pytest.mark.parametrize(
    ("srun", "reason"),
    [
        (None, "there is no srun"),
        ("MPI plugin types are...\nnone", "it does not offer --mpi=pmix"),
    ],
)
def test_mpirun_where_srun_cannot_and_that_is_said(folder, srun, reason):
    make(folder / "mpirun", VERSIONS["Open MPI"])
    if srun is not None:
        make(folder / "srun", srun)
    command, notes = start_command(Request(["x"], None), OPEN_MPI, IN_SLURM)
    assert (command[0], command[-3:]) == (str(folder / "mpirun"), ["-n", "6", "x"])
    assert reason in notes[0]
    asked = Request(["x"], 2, launcher="srun")
    assert start_command(asked, OPEN_MPI, IN_SLURM)[0][0] == "srun"


def test_intel_mpi_has_an_mpirun_that_knows_slurm(folder):
    make(folder / "mpirun", VERSIONS["Intel"])
    make(folder / "srun", "pmi2")
    intel = Library("Intel(R) MPI Library 2021.17 for Linux* OS", None)
    command, notes = start_command(Request(["x"], 2), intel, IN_SLURM)
    assert command[0] == str(folder / "mpirun")
    assert "Intel" in notes[0]


def test_within_a_job_it_is_refused(folder):
    environ = {"OMPI_COMM_WORLD_SIZE": "2"}
    with pytest.raises(
        mpidist.LaunchError, match="one of 2; call `mpidist run` outside"
    ):
        start_command(Request(["x"], 2), OPEN_MPI, environ)


def test_programs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.py").write_text("")
    Path("script").write_text("")
    make(tmp_path / "binary", "x")
    assert program(["job.py", "-x"]) == [PYTHON, "job.py", "-x"]
    assert program(["script"]) == [PYTHON, "script"]
    assert program(["./binary", "a"]) == ["./binary", "a"]
    assert program(["cat"]) == ["cat"]
    assert program(["-m", "a.b", "c"]) == [PYTHON, "-m", "a.b", "c"]
    with pytest.raises(mpidist.LaunchError, match=r"there is no file none\.py"):
        program(["none.py"])
    with pytest.raises(mpidist.LaunchError, match="not a Python script or"):
        program(["no-such-program"])


def test_what_is_printed_is_what_works(tmp_path):
    """The command line of `--dry-run`, in a shell."""
    script = tmp_path / "job.py"
    script.write_text(
        "import sys, mpidist\n"
        "strategy = mpidist.MirroredStrategy(['CPU:0'])\n"
        "if strategy.extended.replica_id == 0:\n"
        "    print(strategy.num_replicas_in_sync, sys.argv[1:], flush=True)\n"
    )
    words = [PYTHON, "-m", "mpidist", "run", "-n", "2", "--oversubscribe", "--dry-run"]
    printed = launching.run([*words, str(script), "a b", "--c"])
    assert printed.returncode == 0, printed.stderr
    assert shlex.split(printed.stdout)[-4:] == [PYTHON, str(script), "a b", "--c"]
    ended = launching.run(["bash", "-c", printed.stdout])
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "2 ['a b', '--c']\n"
