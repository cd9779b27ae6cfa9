"""The flight recorder, and what `python -m mpidist diff` makes of its dumps."""

import contextlib
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.__main__ import main
from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.flight_files import (
    CALLS,
    FORMAT,
    RING_BYTES,
    WORDS,
    calls_path,
    ring_path,
)
from mpidist.resilience.flight_analysis import compare, read_flights

PROLOGUE = """
import os, signal, sys
import numpy as np
import mpidist

strategy = mpidist.MirroredStrategy(["CPU:0"])
rank = strategy.extended.replica_id
for step in range(20):
    strategy.reduce("SUM", np.ones(3))
"""
ENDINGS = {
    "killed": "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n",
    "crashed": "if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)\n",
    "raised": "if rank == 1: raise KeyError('the reason')\n",
    "diverged": "if rank == 1: strategy.gather(np.ones(1), 0)\n",
}
EPILOGUE = 'strategy.reduce("MEAN", np.ones(5))\n'


class DamagedError(Exception):
    """A damaged dump was refused, by its name."""


def here():
    """Return the file and the line of the caller."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def test_the_last_call_is_known(comm, strategy):
    recorder = strategy.extended.consensus.recorder
    for count in (1, 1, 3, 100_000):  # also those that are repeated
        before = time.monotonic()
        strategy.reduce("SUM", np.ones(count))
        site = here()
        last = recorder.last()
        if comm.size == 1:
            assert last is None
            continue
        assert last.operation == "reduce"
        file, line = site.rsplit(":", 1)
        assert last.site == f"{file}:{int(line) - 1}"
        assert before <= last.begun <= last.ended <= time.monotonic()


@pytest.mark.mpi(min_size=2)
def test_a_call_is_open_while_others_are_waited_for(comm, consensus):
    from mpidist.comm.consensus.signatures import CallSignature

    recorder = consensus.recorder
    consensus.require_same(CallSignature("first"))
    if comm.rank == 0:
        with consensus.lock:
            consensus.require_same(CallSignature("second"))
            assert recorder.last().ended is None
            assert recorder.before_last().operation == "first"
    else:
        consensus.require_same(CallSignature("second"))
    assert recorder.last().operation == "second"
    assert recorder.last().ended is not None


@pytest.mark.mpi(min_size=2)
def test_as_many_calls_as_there_is_room_for_are_kept(comm, monkeypatch, tmp_path):
    folder = comm.bcast(tmp_path)
    monkeypatch.setenv("MPIDIST_DUMPS", str(folder))
    consensus = Consensus(comm.Dup())
    from mpidist.comm.consensus.signatures import CallSignature

    for n in range(CALLS + 100):
        consensus.require_same(CallSignature(f"call {n % 7}"))
    comm.Barrier()
    flights = read_flights([folder])
    assert [flight.rank for flight in flights] == list(range(comm.size))
    for flight in flights:
        assert sorted(flight.calls) == list(range(101, CALLS + 101))
        assert flight.members == tuple(range(comm.size))
        assert flight.key(150)[0] == f"call {149 % 7}"
        begun = [flight.calls[n][1] for n in sorted(flight.calls)]
        assert begun == sorted(begun)
        assert abs(begun[-1] - time.time()) < 3600
    lines, is_same = compare(flights)
    assert is_same
    assert "calls 101 to 1100 are the same on all" in lines[1]
    comm.Barrier()
    consensus.close()
    consensus.comm.Free()
    comm.Barrier()
    assert not list(folder.iterdir())


def test_a_call_is_seen_whole_or_not_at_all(comm, consensus, monkeypatch):
    """The watchdog may look in the middle of `begin`, and ends jobs by what it sees."""
    from mpidist.comm.consensus import flight_recorder as module
    from mpidist.comm.consensus.signatures import CallSignature

    seen = []
    pack = module._PACK_INTO

    def look_then_pack(*arguments):
        seen.append(consensus.recorder.last())
        pack(*arguments)

    monkeypatch.setattr(module, "_PACK_INTO", look_then_pack)
    for n in range(3):
        consensus.recorder.begin(n + 1, CallSignature(f"call {n}"), n)
        consensus.recorder.end()
    operations = [entry and entry.operation for entry in seen]
    assert operations == [None, "call 0", "call 1"]


def test_kinds_of_calls_that_never_come_again_are_forgotten(consensus, monkeypatch):
    from mpidist.comm.consensus import flight_recorder as module
    from mpidist.comm.consensus.signatures import CallSignature

    monkeypatch.setattr(module, "_MOST_KINDS", CALLS + 100)
    recorder = consensus.recorder
    for n in range(5 * CALLS):
        recorder.begin(n + 1, CallSignature(f"call {n}"), n)
        assert recorder.last().operation == f"call {n}"
        recorder.end()
    assert len(recorder._texts) <= CALLS + 100
    assert recorder.before_last().operation == f"call {5 * CALLS - 2}"


@pytest.mark.parametrize(
    "ending",
    [
        "killed",
        *(pytest.param(e, marks=pytest.mark.slow) for e in ENDINGS if e != "killed"),
    ],
)
def test_what_ranks_did_is_kept_when_one_dies(mpirun, tmp_path, ending):
    script = PROLOGUE + ENDINGS[ending] + EPILOGUE
    mpirun(3, script, MPIDIST_DUMPS=str(tmp_path), fails=True)
    diff = [sys.executable, "-m", "mpidist", "diff", str(tmp_path)]
    found = subprocess.run(diff, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (1, "")
    if ending == "diverged":
        assert "is the first that differs" in found.stdout
        assert "rank 1: gather(" in found.stdout
        assert "rank 2: reduce(reduce_op MEAN" in found.stdout
    else:
        # Rank 2 may be ended while it still is in the call before
        missing = r"ranks? (0, )?1(, 2)? did not reach call|differs"
        assert re.search(missing, found.stdout)


def test_nothing_is_left_by_a_job_that_ends_well(mpirun, tmp_path):
    mpirun(2, PROLOGUE + EPILOGUE, MPIDIST_DUMPS=str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def dumps(tmp_path):
    """What two ranks did in 30 calls, all alike."""
    header = {"format": FORMAT, "job": 7, "channel": 0, "members": [0, 1], "host": "h"}
    header |= {"pid": 1, "monotonic_ns": 0, "time": 0.0}
    import json

    for rank in range(2):
        kinds = [
            {"kind": n, "operation": op, "site": "a.py:1", "agreed": {}, "digest": n}
            for n, op in enumerate("xy")
        ]
        lines = [json.dumps(line) for line in ({**header, "rank": rank}, *kinds)]
        calls_path(tmp_path, 7, 0, rank).write_text("\n".join(lines) + "\n")
        ring = np.zeros((CALLS, WORDS), np.int64)
        for n in range(30):
            ring[n] = n + 1, n % 2, 1000 + n, 2000 + n, -1
        ring.tofile(ring_path(tmp_path, 7, 0, rank))
    return tmp_path


def change_ring(dumps, rank, row, values):
    path = ring_path(dumps, 7, 0, rank)
    ring = np.fromfile(path, np.int64).reshape(CALLS, WORDS)
    ring[row] = values
    ring.tofile(path)


def test_equal_dumps_are_equal(dumps, capsys):
    assert main(["diff", str(dumps)]) == 0
    assert "calls 1 to 30 are the same on all" in capsys.readouterr().out


def test_the_first_difference_is_named(dumps, capsys):
    change_ring(dumps, 1, 12, (13, 1, 5, 6, -1))
    change_ring(dumps, 1, 20, (21, 1, 5, 6, -1))
    assert main(["diff", str(dumps)]) == 1
    out = capsys.readouterr().out
    assert "call 13 is the first that differs" in out
    assert "rank 0: x() at a.py:1" in out
    assert "rank 1: y() at a.py:1" in out


def test_ranks_that_are_behind_are_named(dumps, capsys):
    change_ring(dumps, 0, 29, (30, 1, 5, 0, -1))
    change_ring(dumps, 1, 29, (0, 0, 0, 0, 0))
    assert main(["diff", str(dumps)]) == 1
    out = capsys.readouterr().out
    assert "rank 1 did not reach call 30, y() at a.py:1" in out
    assert "30, y at a.py:1, not ended on rank 0; 29, x at a.py:1, ended on ra" in out


def test_of_several_jobs_the_last_is_compared(dumps, capsys):
    """Jobs may have one folder: each has files of its own there."""
    for rank, time_of_job in ((0, 5.0), (1, 5.0)):
        text = calls_path(dumps, 7, 0, rank).read_text()
        other = text.replace('"job": 7', '"job": 8').replace("0.0", f"{time_of_job}")
        calls_path(dumps, 8, 0, rank).write_text(other)
        ring = ring_path(dumps, 7, 0, rank).read_bytes()
        ring_path(dumps, 8, 0, rank).write_bytes(ring)
    change_ring(dumps, 1, 12, (13, 1, 5, 6, -1))  # of the first job
    assert main(["diff", str(dumps)]) == 0
    assert "the last of 2 jobs, in *-job-0000000000000008.jsonl" in (
        capsys.readouterr().out
    )


def test_ranks_without_a_dump_are_named(dumps, capsys):
    calls_path(dumps, 7, 0, 1).unlink()
    assert main(["diff", str(dumps)]) == 1
    assert "no dump of rank 1" in capsys.readouterr().out


def test_no_dumps_are_an_error(tmp_path, capsys):
    assert main(["diff", str(tmp_path)]) == 2
    assert "there is no flight recorder dump" in capsys.readouterr().err
    assert main(["diff", str(tmp_path / "none")]) == 2
    assert "there is no" in capsys.readouterr().err


def test_the_command_needs_no_mpi(dumps):
    code = (
        "import sys; sys.modules['mpi4py'] = None; sys.argv[:1] = ['-m'];"
        "sys.orig_argv = ['python', '-m', 'mpidist', *sys.argv[1:]];"
        "import runpy; runpy.run_module('mpidist', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "diff", str(dumps)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_dumps_are_errors_that_name_the_file(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    header = (
        b'{"format": 3, "job": 7, "channel": 0, "rank": 0, "members": [0], "time": 1.0,'
    )
    header += b' "monotonic_ns": 5}\n{"kind": 0, "operation": "x", "site": "s",'
    header += b' "agreed": {}, "digest": 0}\n'
    text, ring = bytearray(header), bytearray(RING_BYTES)
    ring[:40] = np.array([1, 0, 5, 6, -1]).tobytes()
    for target in (text, ring):
        for _ in range(data.draw(st.integers(0, 3))):
            target[data.draw(st.integers(0, 130))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(ring)))
    calls_path(folder, 7, 0, 0).write_bytes(text)
    ring_path(folder, 7, 0, 0).write_bytes(ring[:cut])
    with contextlib.suppress(DamagedError):
        try:
            lines, _ = compare(read_flights([folder]))
            assert lines
        except mpidist.DataError as error:
            if "channel-0-rank-00000" in str(error):
                raise DamagedError from error
            raise
