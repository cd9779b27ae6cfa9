"""How jobs start and end: launch checks, uncaught exceptions, what import costs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import launching
import pytest

import mpidist
from mpidist.comm.topology import parse_devices
from mpidist.launch import mpi_defaults
from mpidist.launch.launchers import check_launch

FAILING = """
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy()
rank = strategy.extended.replica_id
print("ready", flush=True)
if rank == 1:
    raise KeyError("the reason")
strategy.reduce("SUM", np.ones(3))
"""

FAILING_IN_RUN = """
import mpidist

strategy = mpidist.MirroredStrategy()

def step():
    context = mpidist.get_replica_context()
    if context.replica_id_in_sync_group == 1:
        raise KeyError("the reason")
    context.all_reduce("SUM", 1.0)

strategy.run(step)
"""

FAILING_EVERYWHERE = """
import mpidist

strategy = mpidist.MirroredStrategy()
raise KeyError("the reason")
"""

FAILING_BEFORE = """
import sys
from mpi4py import MPI
import mpidist

if MPI.COMM_WORLD.rank == 1:
    raise KeyError("the reason")
if MPI.COMM_WORLD.rank == 0:
    mpidist.MirroredStrategy()
while True:  # computing, not in MPI
    sys.getrecursionlimit()
"""


LEAVING = """
import sys
import mpidist

strategy = mpidist.MirroredStrategy()
if strategy.extended.replica_id == 1:
    sys.exit(0)
strategy.reduce("SUM", 1.0)
"""

LATE = """
import time
import mpidist

strategy = mpidist.MirroredStrategy()
try:
    strategy.extended.collectives.all_reduce(
        "reduce", "SUM", 1.0, mpidist.CommunicationOptions(timeout_seconds=0.2)
    ) if strategy.extended.replica_id == 0 else time.sleep(1000)
except mpidist.DeadlineError as error:
    print(error)
"""


def test_a_rank_that_exits_while_others_wait_ends_the_job(mpirun):
    ended = mpirun(3, LEAVING, fails=True)
    assert "reduce at <string>:8 on ranks 0, 2; the end of the program" in ended.stderr
    assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr


def test_a_job_that_missed_a_deadline_ends(mpirun):
    ended = mpirun(2, LATE, fails=True)
    assert "rank 1 did not arrive" in ended.stdout
    assert "cannot communicate any more" in ended.stderr


@pytest.mark.parametrize(
    "script",
    [
        FAILING_IN_RUN,
        pytest.param(FAILING, marks=pytest.mark.slow),
        pytest.param(FAILING_BEFORE, marks=pytest.mark.slow),
    ],
)
def test_an_uncaught_exception_ends_the_job_with_one_traceback(mpirun, script):
    ended = mpirun(3, script, fails=True)
    assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr
    assert "mpidist: rank 1 of 3 failed" in ended.stderr
    assert "KeyError: 'the reason'" in ended.stderr


DIVERGING = """
import mpidist
strategy = mpidist.MirroredStrategy()
rank = strategy.extended.replica_id
if rank == 0:
    strategy.reduce("SUM", 1.0)
strategy.barrier()
"""


@pytest.mark.parametrize("full", [False, True])
def test_an_error_of_the_library_shows_the_programs_lines(mpirun, full):
    environ = {"MPIDIST_FULL_TRACEBACKS": "1"} if full else {}
    ended = mpirun(2, DIVERGING, **environ, fails=True)
    lines = re.findall(r'^  File ".*", line \d+, in .*', ended.stderr, re.M)
    assert "mpidist.errors.DivergenceError: the replicas called" in ended.stderr
    assert lines[0].endswith("in <module>"), ended.stderr
    assert lines[1].endswith(("in reduce", "in barrier")), ended.stderr
    assert (len(lines) > 2) == full, ended.stderr


FAILING_IN_IMPORT = """
import builtins, importlib.abc, os, sys
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]

class Failing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if rank == "1" and name == "mpidist.strategy.strategy":
            raise getattr(builtins, sys.argv[1])

sys.meta_path.insert(0, Failing())
import mpidist
mpidist.MirroredStrategy().reduce("SUM", 1.0)
"""


@pytest.mark.parametrize(
    "kind", ["MemoryError", pytest.param("KeyboardInterrupt", marks=pytest.mark.slow)]
)
def test_an_exception_in_the_import_ends_the_job(mpirun, kind):
    """Others may be through with it, and wait for the rank that is not."""
    ended = mpirun(2, FAILING_IN_IMPORT, kind, MPIDIST_HANG_SECONDS="inf", fails=True)
    assert f"\n{kind}" in ended.stderr
    assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr


HANDLERS = """
import signal
import mpi4py

class Level(str):
    def upper(self):  # right before MPI_Init_thread
        print("while MPI starts:", repr(signal.getsignal(signal.SIGINT)))
        return super().upper()

mpi4py.rc.thread_level = Level("multiple")
import mpidist
print("behind it:", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
"""


def test_ctrl_c_while_mpi_starts_is_not_put_off(mpirun):
    """Python would only see it behind MPI_Init, which waits for the other ranks."""
    out = mpirun(1, HANDLERS).stdout
    assert "while MPI starts: <Handlers.SIG_DFL: 0>\nbehind it: True" in out


WITHOUT_MPI = """
import mpi4py
mpi4py.rc.initialize = False
try:
    import mpidist
except RuntimeError as error:
    print(type(error).__name__, "Init_thread" in str(error))
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_MULTIPLE)
import mpidist
print(mpidist.MirroredStrategy(["CPU:0"]).reduce("SUM", 1.0))
MPI.Finalize()
"""


def test_mpi_that_the_program_starts_later(mpirun):
    """MPI itself would end the process at the first call."""
    ended = mpirun(1, WITHOUT_MPI)
    assert ended.stdout.split() == ["LaunchError", "True", "1.0"], ended.stderr


TIMER = """
import faulthandler, signal
faulthandler.dump_traceback_later(600)  # there is only one
faulthandler.dump_traceback_later = faulthandler.cancel_dump_traceback_later = None
import mpidist
print(signal.getitimer(signal.ITIMER_REAL)[0], faulthandler.unregister(signal.SIGALRM))
"""


def test_the_import_leaves_the_programs_timer_alone(mpirun):
    """Nor is the one that limits MPI's start left behind."""
    ended = mpirun(1, TIMER)
    assert ended.stdout.split() == ["0.0", "False"], ended.stderr


NO_HOME = """
import os, pwd, sys, tempfile
from mpi4py import MPI  # Open MPI needs a home
home = sys.argv[1 + MPI.COMM_WORLD.rank]
def missing(*_):
    raise KeyError("uid not found")
pwd.getpwuid = missing
for name in ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
    if home != "none":
        os.environ[name] = home
import mpidist
from mpidist.comm.device_info import cache_path, _read, _write
_write(cache_path(), _read(cache_path()))
os.chdir(folder := tempfile.mkdtemp())
os.rmdir(folder)
print(mpidist.MirroredStrategy(["CPU:0"]).reduce("SUM", 1.0))
"""


def test_a_home_that_cannot_be_used_hurts_no_job(mpirun, tmp_path):
    """Nor does a folder that was removed. Each rank has another one."""
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    homes = ["/dev/null", "none", "", "/nonexistent", "x", str(loop)]
    ended = mpirun(len(homes), NO_HOME, *homes)
    assert ended.stdout.split() == ["6.0"] * len(homes), ended.stderr


@pytest.mark.slow
def test_ranks_that_fail_alike_print_one_traceback(mpirun):
    ended = mpirun(3, FAILING_EVERYWHERE, fails=True)
    assert ended.stderr.count("KeyError: 'the reason'") == 1, ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("script", [FAILING_EVERYWHERE, FAILING_IN_RUN])
def test_ranks_stay_silent_however_long_the_report_of_one_takes(mpirun, script):
    """As on a busy machine, where the launcher ends the others some time later."""
    slow = """
from mpidist.resilience import exit_handling
exit_handling._REPORT_SECONDS = 2.0
"""
    ended = mpirun(3, slow + script, fails=True)
    assert ended.stderr.count("Traceback (most recent call last)") == 1, ended.stderr
    assert "KeyError: 'the reason'" in ended.stderr


WORKERS = """
import multiprocessing
import sys

import mpidist


def square(x):
    return x * x


if __name__ == "__main__":
    strategy = mpidist.MirroredStrategy()
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        found = sum(pool.map(square, range(4)))
    print(strategy.reduce("SUM", found), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_of_multiprocessing_may_import_the_script(mpirun, tmp_path, method):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    ended = mpirun(2, str(script), method)
    assert ended.stdout.split() == ["28", "28"]


@pytest.mark.slow
def test_an_exception_of_one_process_alone_is_as_without_mpidist():
    code = "import mpidist; mpidist.MirroredStrategy(); raise KeyError('the reason')"
    ended = launching.run([sys.executable, "-c", code])
    assert ended.returncode == 1
    assert "mpidist: rank" not in ended.stderr
    assert ended.stderr.endswith("KeyError: 'the reason'\n")


def test_a_replaced_excepthook_is_left_alone():
    code = "import sys; sys.excepthook = print; import mpidist; print(sys.excepthook)"
    assert (
        "built-in function print" in launching.run([sys.executable, "-c", code]).stdout
    )


@pytest.mark.slow
def test_pytest_reports_a_failure_itself(tmp_path):
    test = tmp_path / "test_it.py"
    test.write_text("import mpidist\ndef test():\n    raise KeyError('the reason')\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(test)]
    ended = launching.run([*command, "--rootdir", str(tmp_path)])
    assert ended.returncode == 1
    assert "1 failed" in ended.stdout


@pytest.mark.parametrize(
    ("environ", "library", "command"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "CRAY MPICH version 8", "srun --mpi=cray"),
        (  # what is right did not do, so Slurm's PMIx may be too old
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_MPI_TYPE": "pmix"},
            "Open MPI v5.0.11, package",
            "mpirun.* -n 4 python .*' inside of an allocation",
        ),
    ],
)
def test_what_singletons_are_told(environ, library, command):
    with pytest.raises(mpidist.LaunchError, match=command) as caught:
        check_launch(environ, 1, library)
    name, text = next(iter(environ.items()))
    assert f"started {text} processes ({name}={text})" in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "4"},  # one process in a batch script
        {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "4294967290"},
        {"PMI_SIZE": "many"},
        # One rank by mpirun in an allocation of two nodes, each with a daemon
        {"PMI_SIZE": "1", "MPI_LOCALNRANKS": "1", "SLURM_STEP_NUM_TASKS": "2"},
    ],
)
def test_good_launches_pass(environ):
    check_launch(environ, 1, "MPICH Version: 5.0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("GPU:1", ("GPU", 1)),
        ("cpu:0", ("CPU", 0)),
        ("/gpu:3", ("GPU", 3)),
        ("/CPU:0", ("CPU", 0)),
        ("/device:CPU:0", ("CPU", 0)),
        ("/device:GPU:1", ("GPU", 1)),
        ("device:gpu:2", ("GPU", 2)),
        ("/job:worker/task:0/device:GPU:0", ("GPU", 0)),
        ("/job:localhost/replica:0/task:2/gpu:1", ("GPU", 1)),
        ("/job:worker/replica:0/task:2/device:GPU:1", ("GPU", 1)),
    ],
)
def test_device_strings(text, expected):
    assert parse_devices([text]) == [expected]


@pytest.mark.parametrize(
    "devices",
    [
        [],
        ["GPU"],
        ["GPU:x"],
        ["TPU:0"],
        [0],
        ["CPU:0", "CPU:0"],
        ["CPU:0", "/device:CPU:0"],
        ["/task:x/device:CPU:0"],
        ["/nonsense/CPU:0"],
        ["CPU:0/"],
    ],
)
def test_malformed_devices_are_refused_on_all_ranks(comm, devices):
    with pytest.raises(ValueError, match="devices"):
        mpidist.MirroredStrategy(devices, communicator=comm)


@pytest.mark.mpi(min_size=3)
def test_fewer_devices_than_local_ranks_are_refused_on_all_ranks(comm):
    with pytest.raises(ValueError, match="too few"):
        mpidist.MirroredStrategy(["CPU:0", "CPU:1"], communicator=comm)


def test_a_string_instead_of_devices_is_refused(comm):
    with pytest.raises(TypeError, match="list of strings"):
        mpidist.MirroredStrategy("CPU:0", communicator=comm)


def test_import_loads_no_heavy_library():
    code = "import sys, mpidist; print(*sys.modules)"
    modules = launching.run([sys.executable, "-c", code]).stdout.split()
    loaded = {name.partition(".")[0] for name in modules}
    assert {"numpy", "h5py", "mpi4py"} <= loaded
    assert not loaded & {"cupy", "torch", "sklearn", "matplotlib", "scipy", "pandas"}


@pytest.mark.slow
def test_the_fixture_reports_a_job_that_hangs():
    with pytest.raises(AssertionError, match="still ran after"):
        launching.run(
            [sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.5
        )


SHADOWS = ("json", "mpi4py", "numpy", "argparse", "subprocess", "h5py", "mpidist")


PROBE = "from mpidist.device import probe\nprint(probe.run(0).why)\n"
COMMAND = str(Path(sys.executable).with_name("mpidist"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([COMMAND, "run", "-n", "1", "--dry-run", "sh"], ""),
        ([COMMAND, "version"], ""),
        pytest.param([COMMAND, "doctor"], "", marks=pytest.mark.slow),
        ([sys.executable, "elsewhere/job.py"], "tried on one rank: "),
    ],
)
def test_nothing_of_the_current_folder_is_run(tmp_path, words, says):
    """Others may be able to write there: a `json.py`. The last one probes a GPU."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w')\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "job.py").write_text(PROBE)
    ended = launching.run(["sh", "-c", 'cd "$0" && exec "$@"', tmp_path, *words])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert says in ended.stdout, ended.stderr
    assert list(tmp_path.glob("ran-*")) == []


HOLD = """
import os, socket, sys
if sys.argv[1] == "other":
    os.setgid(65534)
    os.setuid(65534)
held = [socket.socket(socket.AF_UNIX, kind) for kind in (1, 2)]
for one in held:
    one.bind("\\0" + sys.argv[2])
if sys.argv[1] == "other":
    held[0].listen()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("who", ["other", "silent"])
def test_a_stranger_cannot_silence_an_error(monkeypatch, who):
    """Who holds the address by which the processes of a node agree who reports."""
    if who == "other" and os.getuid():
        pytest.skip("only root can be another user")
    address = f"mpidist-failure-{mpi_defaults._namespace()}-{os.getuid()}-{os.getpid()}"
    monkeypatch.setattr(os, "getppid", os.getpid)
    words = [sys.executable, "-c", HOLD, who, address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, **pipes, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        claim = mpi_defaults.claim_report()
        holder.stdin.close()
    assert claim is not None
    claim.close()


def test_one_process_of_a_node_reports(monkeypatch):
    monkeypatch.setattr(os, "getppid", os.getpid)
    claim = mpi_defaults.claim_report()
    assert claim is not None
    assert mpi_defaults.claim_report() is None
    claim.close()
    again = mpi_defaults.claim_report()
    assert again is not None
    again.close()
