"""What only informs never hurts a job: stderr that fails, warnings that are errors."""

import shlex
import socket
import sys
import warnings

import launching
import pytest
from mpi4py import MPI

from mpidist.util import logs

REDUCE = """
import os, signal, sys, threading, warnings
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
rank = strategy.extended.replica_id
"""
HANG = """
from mpidist.resilience import watchdog
watchdog._SLOW_SECONDS = 0.1
if rank == 1:
    threading.Event().wait()
strategy.reduce("SUM", 1)
"""
WELL = """
assert strategy.reduce("SUM", 1) == 2
sys.stdout.write("well\\n")
"""
# A stderr that fails, as shells make it
STDERR = {
    "a full disk": "2>/dev/full",
    "closed": "2>&-",
    "a broken pipe": "2> >(exec true)",
    "a pipe that nobody reads": "2> >(exec sleep 30 >/dev/null)",
}
# So that a write to it waits
FILL_PIPE = """
import fcntl
fcntl.fcntl(2, fcntl.F_SETPIPE_SZ, 4096)
os.set_blocking(2, False)
try:
    while True:
        os.write(2, bytes(4096))
except BlockingIOError:
    os.set_blocking(2, True)
"""


def run_ranks_with(redirection, script, **environment):
    """Run two ranks, whose stderr a shell redirects; return the finished job."""
    python = shlex.join([sys.executable, "-c", script])
    shell = ["bash", "-c", f"exec {python} {redirection}"]
    return launching.run([*launching.mpirun_command(2), *shell], **environment)


@pytest.mark.mpirun
@pytest.mark.parametrize(
    "stderr",
    [
        "a full disk",
        pytest.param("closed", marks=pytest.mark.slow),
        pytest.param("a broken pipe", marks=pytest.mark.slow),
    ],
)
def test_a_healthy_job_ends_well(stderr):
    """The banner is written there, and said nothing of in stdout."""
    ended = run_ranks_with(STDERR[stderr], REDUCE + WELL)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["well", "well"]


@pytest.mark.slow
@pytest.mark.mpirun
@pytest.mark.parametrize("stderr", STDERR)
def test_a_hang_ends(stderr):
    fill = FILL_PIPE if stderr == "a pipe that nobody reads" else ""
    script = REDUCE + fill + HANG
    ended = run_ranks_with(STDERR[stderr], script, MPIDIST_HANG_SECONDS="2")
    assert ended.returncode != 0


@pytest.mark.mpirun
@pytest.mark.parametrize(
    "stderr", ["a full disk", pytest.param("closed", marks=pytest.mark.slow)]
)
def test_an_exception_of_one_rank_ends_the_job(stderr):
    script = REDUCE + "if rank == 1: raise KeyError\n" + WELL
    ended = run_ranks_with(STDERR[stderr], script)
    assert ended.returncode != 0


def test_warnings_that_are_errors_do_not_keep_ranks_apart(mpirun, tmp_path):
    """They come up on one rank: of a full node, of a folder, of MPI's threads."""
    file = tmp_path / "file"
    file.touch()
    script = f"""
import os, sys, warnings
warnings.simplefilter("error")
import mpi4py
mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI
import numpy as np
import mpidist
from mpidist.comm.shared_memory import node
node.free_bytes = lambda is_shared: {{"/dev/shm": 1000}}
if MPI.COMM_WORLD.rank == 1:
    os.environ["MPIDIST_DUMPS"] = {str(file)!r}
strategy = mpidist.MirroredStrategy(["CPU:0"])
strategy.gradient_buckets([np.zeros(3)])
{WELL}"""
    ended = mpirun(2, script)
    assert ended.stdout.split() == ["well", "well"]
    for text in (
        "the ranks of a node need",
        "the calls of rank 1",
        "gradients are reduced at the end",
    ):
        assert f"RuntimeWarning: {text}" in ended.stderr


def test_a_warning_is_a_warning():
    where = f"rank {MPI.COMM_WORLD.rank} {socket.gethostname()}"
    with pytest.warns(RuntimeWarning, match=rf"^a text \[{where}\]$") as caught:
        logs.warn("a text")
    assert caught[0].filename == __file__


def test_a_warning_that_would_raise_is_logged(caplog):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs.warn("a text")
    (record,) = caplog.records
    assert record.getMessage() == "RuntimeWarning: a text"
    assert record.levelname == "WARNING"


def test_a_warning_is_a_record_too(caplog):
    with pytest.warns(RuntimeWarning):
        logs.warn("100 %s of it")
    (record,) = caplog.records
    assert (record.name, record.getMessage()) == ("mpidist.warnings", "100 %s of it")


@pytest.mark.parametrize("stream", [None, object()])
def test_streams_that_are_none(monkeypatch, capsys, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    logs.write("a text")
    assert capsys.readouterr().out == ""
