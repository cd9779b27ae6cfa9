"""`python -m mpidist doctor`, run for real, on places that are made bad for it."""

import ctypes
import functools
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import launching
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpidist

DOCTOR = ["-m", "mpidist", "doctor"]
LIBRARY = str(Path(mpidist.__file__).parents[1])
CORES = sorted(os.sched_getaffinity(0))

# Runs a command with other variables, or bound to a core, on some ranks
WRAPPER = """
import json, os, sys
names = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")
rank = next(os.environ[name] for name in names if name in os.environ)
changes = json.loads(sys.argv[1])
for name, value in {**changes.get("all", {}), **changes.get(rank, {})}.items():
    if name == "core":
        os.sched_setaffinity(0, [value])
    elif name == "alone":  # as if the launcher spoke another protocol
        for key in list(os.environ):
            if key.startswith(("PMI", "OMPI_COMM", "OMPI_UNI", "PMIX", "PRTE", "HYD")):
                del os.environ[key]
        os.environ.update(SLURM_PROCID=rank, SLURM_STEP_NUM_TASKS=value)
    else:
        os.environ[name] = value
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


class Report:
    """What a run of the doctor said."""

    def __init__(self, ended):
        self.ended = ended
        assert "Traceback" not in ended.stdout + ended.stderr, ended
        assert ended.stdout, ended
        # Launchers may write behind it that the job has failed
        self.all, _ = json.JSONDecoder().raw_decode(ended.stdout)
        self.rows = {row["what"]: row for row in self.all["findings"]}
        failed = [row for row in self.rows.values() if row["status"] == "FAIL"]
        assert bool(failed) == (ended.returncode != 0), ended
        assert self.all["status"] == max(
            (row["status"] for row in self.rows.values()),
            key=["OK", "WARN", "FAIL"].index,
        )
        for row in self.rows.values():
            assert row["status"] == "OK" or row["remedy"], row

    def __call__(self, what, status):
        """Return what was found, which must have the status."""
        row = self.rows[what]
        assert row["status"] == status, row
        return row["found"]


# Checks that end take no longer for it; where nothing answers, tests name less
LONG = "100"


def together(ranks, changes, *arguments, seconds=LONG, **environment):
    """Return what the doctor says in a job; without mpirun if `ranks` is 0."""
    command = [*(launching.mpirun_command(ranks) if ranks else []), sys.executable]
    if changes:
        command += ["-c", WRAPPER, json.dumps(changes)]
    command += [*DOCTOR, "--json", "--seconds", seconds, *arguments]
    return Report(launching.run(command, **{"PYTHONPATH": LIBRARY} | environment))


alone = functools.partial(together, 0, {})


@pytest.fixture
def fake(tmp_path):
    """Makes a module that stands before the real one; returns a PYTHONPATH."""

    def make(name, text):
        path = tmp_path / "fake" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return f"{tmp_path / 'fake'}{os.pathsep}{LIBRARY}"

    return make


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 3))]
)
def test_all_is_well(tmp_path, ranks):
    """Ranks that share cores are not, but that is the machine's, not the doctor's."""
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        file["x"] = 1
    report = together(ranks, {}, "--paths", str(tmp_path), str(path))
    assert report.all["ranks"] == max(1, ranks)
    ill = {what for what, row in report.rows.items() if row["status"] == "FAIL"}
    assert ill <= {"binding"}
    assert report.all["mpidist"] == mpidist.__version__
    assert f"MPI sees {ranks} " in report("launcher", "OK") or ranks < 2
    assert mpidist.__version__ in report("mpidist", "OK")
    assert "gzip, shuffle, fletcher32" in report("HDF5's filters", "OK")
    assert report(f"{path}: HDF5", "OK") == "can be read"
    for place in (tmp_path, path):
        assert "fcntl, HDF5" in report(f"{place}: locks", "OK")
        assert report(f"{place}: writing", "OK")
    assert ("all_reduce, CPU" in report.rows) == (ranks > 1)
    assert ranks < 2 or f"{ranks} replicas on 1 node" in report("strategy", "OK")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_table_says_the_same():
    command = [sys.executable, *DOCTOR]
    ended = launching.run(command, PYTHONPATH=LIBRARY, MPI4PY_RC_THREAD_LEVEL="single")
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert all(len(line) <= 88 for line in lines)
    (bad,) = (line for line in lines if line.startswith("FAIL"))
    assert "MPI_THREAD_SINGLE" in bad
    assert "-> unset MPI4PY_RC_THREAD_LEVEL" in ended.stdout
    assert lines[-1].endswith("1 FAIL")


@pytest.mark.slow
def test_json_goes_to_a_file(tmp_path):
    path = tmp_path / "report.json"
    command = [sys.executable, *DOCTOR, "--json", str(path)]
    ended = launching.run(command, PYTHONPATH=LIBRARY)
    assert ended.stdout == ""
    assert json.loads(path.read_text())["ranks"] == 1
    command[-1] = str(tmp_path / "no" / "report.json")
    ended = launching.run(command, PYTHONPATH=LIBRARY)
    assert ended.returncode == 1
    assert "error: " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.slow
def test_bad_paths(tmp_path, ranks):
    fifo, damaged, ring = tmp_path / "fifo", tmp_path / "bad.h5", tmp_path / "ring"
    os.mkfifo(fifo)
    damaged.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    ring.symlink_to(ring)
    missing = tmp_path / "missing"
    paths = map(str, [fifo, damaged, ring, missing, "/proc"])
    report = together(ranks, {}, "--paths", *paths)
    assert "neither a file nor a folder" in report(str(fifo), "FAIL")
    assert "No such file" in report(str(missing), "FAIL")
    assert report(str(ring), "FAIL")
    assert report(f"{damaged}: HDF5", "FAIL")
    assert report("/proc", "OK") == "proc mounted on /proc"
    assert report("/proc: writing", "WARN")
    assert "/proc: locks" not in report.rows


@pytest.mark.slow
def test_folders_that_only_some_ranks_see(tmp_path):
    """A relative path, as another rank has another working folder."""
    (tmp_path / "here").mkdir()
    changes = {"all": {"PYTHONPATH": LIBRARY}}
    script = WRAPPER.replace("os.execv", f"os.chdir({str(tmp_path)!r} if rank == '0' "
                             "else '/'); os.execv")  # fmt: skip
    command = [*launching.mpirun_command(2), sys.executable, "-c", script]
    command += [json.dumps(changes), *DOCTOR, "--json", "--paths", "here"]
    report = Report(launching.run(command))
    assert "rank 1: No such file" in report("here", "FAIL")


@pytest.fixture
def dead_folder(tmp_path):
    """A folder on a file system of which nothing ever answers."""
    folder = tmp_path / "dead"
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("there is no /dev/fuse for this user")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    if libc.mount(b"dead", os.fsencode(folder), b"fuse.dead", 6, options):
        os.close(server)
        pytest.skip("mounting needs root")
    yield folder
    os.close(server)  # which ends what waits there
    assert libc.umount2(os.fsencode(folder), 2) == 0


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.slow
def test_a_dead_file_system_does_not_stop_it(dead_folder, tmp_path, ranks):
    where = ["--paths", str(dead_folder), str(tmp_path)]
    report = together(ranks, {}, *where, seconds="3")
    assert "no answer" in report(str(dead_folder), "FAIL")
    assert report(f"{tmp_path}: locks", "OK")


@pytest.mark.slow
def test_what_is_wrong_with_the_ranks_of_a_job():
    """Of each check by itself: test_doctor_checks.py."""
    changes = {
        "all": {"core": CORES[-1]},
        "0": {"PYTHONHASHSEED": "1", "MPIDIST_CUDA_AWARE": "0"},
        "1": {"PYTHONHASHSEED": "2"},
    }
    report = together(
        3,
        changes,
        OMP_NUM_THREADS="64",
        HDF5_USE_FILE_LOCKING="FALSE",
        MPIDIST_RANKS_PER_NODE="2",
    )
    assert f"ranks 0-1 on core {CORES[-1]}" in report("binding", "FAIL")
    assert "128 threads of ranks 0-1" in report("threads", "WARN")
    found = report("PYTHONHASHSEED", "WARN")
    assert found == "rank 0: 1; rank 1: 2; rank 2: not set"
    assert report("MPIDIST_CUDA_AWARE", "FAIL") == "rank 0: 0; ranks 1-2: not set"
    assert "does not lock" in report(".: locks", "OK")
    assert "2 nodes" in report("nodes", "WARN")
    report = alone(SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="0", OMP_NUM_THREADS="many")
    assert "SLURM_STEP_NUM_TASKS=4" in report("launcher", "FAIL")
    assert "OMP_NUM_THREADS=many" in report("threads", "WARN")


def test_an_mpirun_of_another_mpi(tmp_path):
    """What works stands under the row; what is there need not be installed."""
    names = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2"}
    if not launching.is_open_mpi():
        names = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}
    report = alone(**names)
    assert "which another MPI library cannot join" in report("starting MPI", "FAIL")
    remedies = {row["what"]: row["remedy"] for row in report.all["findings"]}
    assert "mpirun -n 2 python -m mpidist doctor'" in remedies["starting MPI"]
    assert "pip install mpich" not in report.ended.stdout
    good = [row for row in report.all["findings"] if row["status"] == "OK"]
    assert [row["remedy"] for row in good] == [""] * len(good)


@pytest.mark.slow
def test_processes_that_mpi_does_not_join_print_once():
    """As under an srun with the wrong --mpi=."""
    report = together(3, {"all": {"alone": "3"}})
    assert "MPI sees 1 process" in report("launcher", "FAIL")
    assert report.ended.stdout.count('"findings"') == 1


@pytest.mark.slow
def test_no_mpi():
    environment = {"MPI4PY_LIBMPI": "/nonexistent"}
    for report in (alone(**environment), together(2, {}, **environment)):
        assert "/nonexistent" in report("starting MPI", "FAIL")
        assert report.all["ranks"] is None
        assert report(".: locks", "OK")  # the rest is looked at


@pytest.mark.slow
def test_a_broken_package(fake):
    """Of others that crash or block: test_doctor_checks.py."""
    report = alone(PYTHONPATH=fake("optree", "raise OSError('no\\nlibrary')"))
    assert "OSError: no library" in report("optree", "FAIL")
    assert "optree" in report("starting MPI", "FAIL")


# What mpidist uses of mpi4py before it imports mpi4py.MPI
_MPI4PY = """
def rc(**settings): pass
rc.initialize, rc.finalize = True, None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "text", "expected"),
    [
        (0, "import os; os._exit(3)", "ended with 3"),
        (0, "import os; os.open(os.environ['FIFO'], os.O_RDONLY)", "no end in"),
        (2, "import os; os.abort()", "ended by SIGABRT"),
        (2, "raise ImportError('no MPI')", "no MPI"),
    ],
)
def test_mpi_that_does_not_start(fake, tmp_path, ranks, text, expected):
    """On two ranks, on rank 1, of which rank 0 only knows that it does not come."""
    os.mkfifo(tmp_path / "fifo")
    path = fake("mpi4py.__init__", _MPI4PY)
    fake("mpi4py.MPI", text)
    environment = {"PYTHONPATH": path, "FIFO": str(tmp_path / "fifo")}
    if ranks:
        # Rank 0 waits for rank 1 for a multiple of this
        report = together(ranks, {"1": environment}, seconds="5")
        assert report("starting MPI", "FAIL")
        assert expected in report.ended.stderr
    else:
        assert expected in alone(**environment, seconds="3")("starting MPI", "FAIL")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "stage", "number"),
    [
        ("optree", "checking this process", signal.SIGTERM),
        ("optree", "", signal.SIGKILL),
        ("mpi4py.MPI", "starting MPI", signal.SIGTERM),
        ("mpi4py.MPI", "", signal.SIGKILL),
    ],
)
def test_no_process_stays_when_it_is_ended(fake, tmp_path, module, stage, number):
    fifo, pid_file = tmp_path / "fifo", tmp_path / "pid"
    os.mkfifo(fifo)
    text = f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid())); "
    if module == "mpi4py.MPI":
        fake("mpi4py.__init__", _MPI4PY)
    path = fake(module, text + f"open({str(fifo)!r})")
    environment = launching.clean_environment() | {"PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, *DOCTOR, "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with open(fifo, "w"):  # when somebody opens it to read
        child = os.pidfd_open(int(pid_file.read_text()))
        process.send_signal(number)
        out, err = process.communicate(timeout=launching.HANG_SECONDS)
        if stage:
            ended = subprocess.CompletedProcess([], process.returncode, out, err)
            assert "ended by SIGTERM" in Report(ended)(stage, "FAIL")
        # Open for writing until here, or the child would end by itself
        assert select.select([child], [], [], launching.HANG_SECONDS)[0]
    os.close(child)


_NUMBERS = st.sampled_from(["0", "1", "2", "-1", "", "x", "1e9", "9" * 30, "\u0663"])
_VARIABLES = """
CUDA_VISIBLE_DEVICES FLUX_TASK_RANK HDF5_PLUGIN_PATH HDF5_USE_FILE_LOCKING
MPIDIST_ALLOW_SINGLETON MPIDIST_CUDA_AWARE MPIDIST_RANKS_PER_NODE MPIDIST_TRANSPORTS
OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE OMP_NUM_THREADS PMI_FD PMI_SIZE
SLURM_STEP_ID SLURM_STEP_NUM_TASKS XDG_CACHE_HOME
"""


@pytest.mark.slow
@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(st.dictionaries(st.sampled_from(_VARIABLES.split()), _NUMBERS, max_size=6))
def test_any_environment(environment):
    alone(seconds="3", **environment)


_LOSE = """
import os, sys
ask = os.sched_getaffinity

def lose(pid):
    if "mpi4py.MPI" in sys.modules:
        os.kill(os.getpid(), {number})
    return ask(pid)

os.sched_getaffinity = lose
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_lost_while_it_is_examined(fake, number):
    """After MPI has started: when it looks at its cores."""
    path = fake("sitecustomize", _LOSE.format(number=int(number)))
    report = together(2, {"1": {"PYTHONPATH": path}}, seconds="5")
    (row,) = [r for r in report.rows.values() if r["what"] == "gathering facts"]
    assert row["status"] == "FAIL"
    assert "rank 1 did not arrive" in row["found"] or "ended by SIGTERM" in row["found"]
