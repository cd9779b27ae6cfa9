"""The files of the flight recorder: bounded, safe to open, and harmless when full."""

import json
import os
import shutil
import subprocess
import sys
import time

import launching
import numpy as np
import pytest

import mpidist
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.flight_files import CALLS, calls_path, ring_path
from mpidist.comm.consensus.signatures import CallSignature
from mpidist.resilience.flight_analysis import compare, read_flights

PROLOGUE = """
import os, sys, time
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
rank = strategy.extended.replica_id
"""
# Fill a file system, then make calls of which each is new
FILL = """
import errno
with open(os.environ["MPIDIST_DUMPS"] + f"/filler-{rank}", "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(512))
    except OSError as error:
        assert error.errno == errno.ENOSPC
strategy.reduce("SUM", 1)
"""
CALLS_OF_MANY_KINDS = """
for n in range(3000):
    assert strategy.reduce("SUM", np.ones(n % 1500)).sum() == 2 * (n % 1500)
print("well")
"""


@pytest.fixture
def dumps(comm, monkeypatch, tmp_path):
    folder = comm.bcast(tmp_path)
    monkeypatch.setenv("MPIDIST_DUMPS", str(folder))
    return folder


@pytest.fixture
def consensus(dumps, consensus):
    return consensus


def own_paths(folder, consensus):
    recorder = consensus.recorder
    names = folder, recorder.job, recorder.channel, mpidist_rank()
    return ring_path(*names), calls_path(*names)


def next_paths(comm, folder):
    job, channel = (comm.allreduce(n, max) for n in (Consensus.job, Consensus.made))
    names = folder, job, channel, mpidist_rank()
    return ring_path(*names), calls_path(*names)


def mpidist_rank():
    from mpi4py import MPI

    return MPI.COMM_WORLD.Get_rank()


def run_on_small_disk(comm, kilobytes, ranks, script, folder):
    """Run a job in whose namespace a small tmpfs is mounted at `folder`."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no `unshare`")
    inside = [unshare, "--user", "--map-root-user", "--mount"]
    allowed = False
    if comm.rank == 0:
        probe = [*inside, "mount", "-t", "tmpfs", "tmpfs", str(folder)]
        allowed = subprocess.run(probe, capture_output=True).returncode == 0
    if not comm.bcast(allowed):
        pytest.skip("mounting in a user namespace is not allowed here")
    ended = None
    if comm.rank == 0:
        mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs {folder}"
        command = [*launching.mpirun_command(ranks), sys.executable, "-c", script]
        shell = [*inside, "sh", "-c", f'{mount} && exec "$@"', "sh", *command]
        ended = launching.run(shell, MPIDIST_DUMPS=str(folder))
    return comm.bcast(ended)


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [16, 64, 256])
def test_a_full_file_system_does_not_end_the_job(comm, tmp_path, kilobytes):
    """Pages that are not there would be SIGBUS, lines that do not fit ENOSPC."""
    script = PROLOGUE + FILL + CALLS_OF_MANY_KINDS
    ended = run_on_small_disk(comm, kilobytes, 2, script, tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("well") == 2
    # One warning for each rank
    assert ended.stderr.count("in MPIDIST_DUMPS") == 2


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["link", "fifo", "folder", "file"])
@pytest.mark.parametrize("which", [0, 1])
def test_what_is_there_is_not_opened(comm, dumps, tmp_path, what, which):
    """Others may write into the folder."""
    target = tmp_path / f"target-{comm.rank}"
    target.write_text("precious")
    path = next_paths(comm, dumps)[which]
    if what == "file":
        path.write_text("of somebody")
    elif what == "link":
        path.symlink_to(target)
    elif what == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    duplicate = comm.Dup()
    with pytest.warns(RuntimeWarning, match="are not recorded in MPIDIST_DUMPS"):
        consensus = Consensus(duplicate)
    consensus.require_same("a call")
    consensus.close()
    duplicate.Free()
    assert target.read_text() == "precious"
    assert len(list(dumps.glob(f"*{mpidist_rank():05}*"))) == 1  # what was there


TWO_JOBS = """
import os, pathlib, signal, sys, time
import mpidist
strategy = mpidist.MirroredStrategy(["CPU:0"])
strategy.reduce("SUM", 1.0)
(pathlib.Path(sys.argv[2]) / f"{sys.argv[1]}-{strategy.rank}").touch()
while not (pathlib.Path(sys.argv[2]) / f"go-{sys.argv[1]}").exists():
    time.sleep(0.01)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_jobs_with_one_folder_leave_each_others_files(tmp_path):
    """The files of a job that is killed stay, if another one ends well meanwhile."""
    jobs, environ = {}, launching.clean_environment()
    environ["MPIDIST_DUMPS"] = str(tmp_path / "dumps")
    for name in ("well", "killed"):
        script = [sys.executable, "-c", TWO_JOBS, name, str(tmp_path)]
        command = [*launching.mpirun_command(2), *script]
        jobs[name] = subprocess.Popen(command, env=environ)
        while len(list(tmp_path.glob(f"{name}-?"))) < 2:
            time.sleep(0.01)
    for name, job in jobs.items():
        (tmp_path / f"go-{name}").touch()
        assert (job.wait(600) == 0) == (name == "well")
    lines, _ = compare(read_flights([tmp_path / "dumps"]))
    assert lines[0] == "communicator 0, 2 ranks:"


@pytest.mark.mpi(min_size=2)
def test_each_step_of_a_dataset_is_no_new_kind_of_call(dumps, make_strategy):
    strategy = make_strategy(["CPU:0"])
    recorder = strategy.extended.consensus.recorder
    _, text = own_paths(dumps, strategy.extended.consensus)
    sizes = []
    for rows in (
        mpidist.Dataset.range(600).batch(2),
        mpidist.Dataset.from_generator(lambda: iter(range(600))).batch(2),
    ):
        for step, _ in enumerate(strategy.experimental_distribute_dataset(rows)):
            if step in (50, 299):
                sizes.append((len(recorder._kinds), text.stat().st_size))
    assert sizes[1] == sizes[0]
    assert sizes[3] == sizes[2]


@pytest.mark.mpi(min_size=2)
def test_the_step_is_in_the_dump(comm, dumps, make_strategy):
    """It is what tells ranks apart that are in the same line of the program."""
    strategy = make_strategy(["CPU:0"])
    rows = mpidist.Dataset.from_generator(lambda: iter(range(6))).batch(2)
    for _ in strategy.experimental_distribute_dataset(rows):
        pass
    comm.Barrier()
    (flight, *_) = read_flights([dumps])
    texts = [flight.text(number) for number in flight.calls]
    for step in range(4):
        assert sum(f"step {step}" in text for text in texts) == 1
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_the_text_is_bounded_for_any_program(comm, dumps, consensus, monkeypatch):
    """Kinds of calls that the ring has no more are removed from the file, too."""
    from mpidist.comm.consensus import flight_recorder as module

    monkeypatch.setattr(module, "_MOST_KINDS", CALLS + 100)
    _, text = own_paths(dumps, consensus)
    most = 0
    for n in range(4 * CALLS):
        consensus.recorder.begin(n + 1, CallSignature(f"call {n}"), n)
        consensus.recorder.end()
        if n % 50 == 0:
            most = max(most, len(text.read_bytes().splitlines()))
    assert most <= CALLS + 102
    comm.Barrier()
    for flight in read_flights([dumps]):
        numbers = sorted(flight.calls)
        assert numbers == list(range(3 * CALLS + 1, 4 * CALLS + 1))
        assert [flight.key(n)[0] for n in numbers] == [f"call {n - 1}" for n in numbers]
    assert compare(read_flights([dumps]))[1]
    comm.Barrier()
    assert len(list(dumps.iterdir())) == 2 * comm.size
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_the_text_of_one_call_is_bounded(dumps, make_strategy):
    strategy = make_strategy(["CPU:0"])
    _, text = own_paths(dumps, strategy.extended.consensus)
    before = text.stat().st_size
    strategy.reduce("SUM", {f"a long name of an array {n}": n for n in range(5000)})
    assert text.stat().st_size - before < 4096
    for line in text.read_text().splitlines():
        json.loads(line)


@pytest.mark.mpi(min_size=2)
def test_a_forked_child_leaves_the_recorder_alone(comm, dumps, consensus):
    consensus.require_same(CallSignature("of the parent"))
    ring, text = own_paths(dumps, consensus)
    before = ring.read_bytes(), text.read_bytes()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            consensus.recorder.begin(7, CallSignature("of the child"), 7)
            consensus.recorder.end()
            consensus.recorder.close(is_kept=False)
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert (ring.read_bytes(), text.read_bytes()) == before
    assert consensus.recorder.last().operation == "of the parent"
    consensus.require_same(CallSignature("of the parent again"))
    assert np.fromfile(ring, np.int64)[0] != 7
