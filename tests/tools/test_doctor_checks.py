"""What the doctor makes of facts: which are well, which are not, whom it names."""

import errno
import mmap
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import launching
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.comm.device_info import GpuFacts, Support
from mpidist.device import binding
from mpidist.launch.launchers import is_silent
from mpidist.tools.doctor import checks, paths
from mpidist.tools.doctor.checks import RankFacts
from mpidist.tools.doctor.children import Child, run_checks
from mpidist.tools.doctor.paths import HELD, HIDDEN, MISSED
from mpidist.tools.doctor.ranks import check_speed, check_strategy
from mpidist.tools.doctor.rows import (
    FAIL,
    OK,
    WARN,
    Failure,
    Row,
    Status,
    as_rows,
    by_rank,
    examine,
    merge,
    name_ranks,
    to_text,
)

SOON = launching.HANG_SECONDS


@given(st.sets(st.integers(0, 40), min_size=1, max_size=8))
def test_ranks_are_named_in_spans(ranks):
    text = name_ranks(ranks)
    assert text.startswith("rank " if len(ranks) == 1 else "ranks ")
    named = set()
    for span in text.partition(" ")[2].removesuffix(" ...").split(", "):
        first, _, last = span.partition("-")
        named |= set(range(int(first), int(last or first) + 1))
    assert named == ranks or (" ..." in text and named < ranks)


def test_values_by_rank():
    assert by_rank({0: "a", 1: "a"}) == "a"
    assert by_rank({0: "a", 1: "b", 2: "b"}) == "rank 0: a; ranks 1-2: b"
    assert by_rank({3: "a"}, asked=range(4)) == "rank 3: a"
    assert by_rank({0: "a", 1: "a"}, asked=range(2)) == "a"
    assert by_rank(dict(enumerate("abcdefgh"))).endswith("; and 2 more")


def version(found):
    return Row(OK, found, "install one", "numpy", unlike=FAIL)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (version("2"), Row(OK, "2", "", "numpy")),
        (version("1"), Row(FAIL, "ranks 0, 2: 2; rank 1: 1", "install one", "numpy")),
        (
            Row(FAIL, "not installed", "pip install", "numpy"),
            Row(FAIL, "rank 1: not installed", "pip install", "numpy"),
        ),
    ],
)
def test_rows_of_ranks_are_merged(other, expected):
    assert merge({0: [version("2")], 1: [other], 2: [version("2")]}) == [expected]


def test_a_rank_that_has_no_answer_is_named():
    late = as_rows("h5py", Failure("no answer in 20 s"))
    everyone = {
        0: [Row(OK, "3", what="h5py")],
        1: late,
        2: as_rows("h5py", Failure("y")),
    }
    (row,) = merge(everyone)
    assert row.status is FAIL
    assert row.found == "rank 1: no answer in 20 s; rank 2: y"


def test_a_check_that_fails_is_a_row():
    (row,) = examine("sums", lambda: 1 / 0)
    assert (row.status, row.what) == (FAIL, "sums")
    assert "itself failed: ZeroDivisionError" in row.found


def test_checks_that_crash_block_and_raise_do_so_alone():
    calls = [(os.abort,), (os.getppid,), (os.strerror, "x"), (os._exit, 3)]
    killed, parent, raised, ended = run_checks(calls, SOON)
    assert killed.startswith("the process was ended by SIGABRT")
    assert parent == os.getpid()
    assert raised.startswith("TypeError: 'str' object cannot be")
    assert ended == Failure("the process ended with 3")
    (blocked,) = run_checks([(signal.pause,)], 0.5)
    assert blocked == Failure("no answer in 0.5 s")


def test_a_late_check_is_killed_with_its_process_group(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    script = f"echo $$ > {fifo}; exec sleep {launching.HANG_SECONDS}"
    with Child(subprocess.run, ["sh", "-c", script]) as child:
        program = os.pidfd_open(int(fifo.read_text()))
        assert child.result(0) == Failure("no answer in 0 s")
    assert select.select([program], [], [], launching.HANG_SECONDS)[0]
    os.close(program)


@pytest.mark.skipif(
    not os.path.exists("/proc/self/schedstat"), reason="Linux does not tell"
)
def test_a_check_that_computes_is_waited_for_but_not_for_ever():
    count = 5 * 10**7  # for about a second
    assert run_checks([(sum, range(count))], 0.5) == [count * (count - 1) // 2]
    (endless,) = run_checks([(sum, range(10**15))], 0.05)
    assert endless == Failure("no answer in 0.05 s")


def test_a_blocked_check_says_at_what():
    program = "from mpidist.tools.doctor import children as c; import signal; "
    program += "c.send('step', 'fsync of a file'); signal.pause()"
    (blocked,) = run_checks([(exec, program)], 3)
    assert blocked == Failure("no answer in 3 s, fsync of a file")


def test_files_that_mpi_has_left_are_counted(tmp_path):
    """Those that no process has open; the rest is somebody else's, or in use."""
    for name in ("mpich_shm_1_0", "sm_segment.a.0", "mpich_shm_2_0", "others"):
        (tmp_path / name).write_bytes(bytes(8192))
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "mpich_shm_3_0").write_bytes(b"a job starts")
    assert checks.count_left(tmp_path, Path("/proc"))[0] == 3
    with (tmp_path / "mpich_shm_1_0").open("r+b") as file:
        assert checks.count_left(tmp_path, Path("/proc"))[0] == 2
        mapped = mmap.mmap(file.fileno(), 0)
    assert checks.count_left(tmp_path, Path("/proc")) == (2, 2 * 8192)
    mapped.close()
    rows = checks.check_memory(1, tmp_path)
    (row,) = [row for row in rows if row.what == "left by MPI"]
    assert row.status is WARN
    assert row.found == f"24 KiB in 3 files of ended jobs in {tmp_path}"
    assert "fuser" in row.remedy


def facts_of(*cores, nodes=None, physical=None, threads="", machine=8, **variables):
    """Return the facts of ranks with these cores, by rank."""
    return {
        rank: RankFacts(
            variables,
            "host",
            frozenset(own),
            frozenset(physical or own),
            machine,
            threads,
            nodes[rank] if nodes else 0,
        )
        for rank, own in enumerate(cores)
    }


@pytest.mark.parametrize(
    ("cores", "status"),
    [
        ([[0, 1], [2, 3]], OK),
        ([range(8), range(8)], OK),
        ([[1], [1]], FAIL),
        ([[0, 1], [0, 1], [0, 1], [2, 3]], FAIL),
        ([[0, 1], [0], [1]], WARN),  # three on two, and there are no more
        ([range(8)] * 9, WARN),
        ([[5]], OK),
    ],
)
def test_binding(cores, status):
    assert checks.check_binding(facts_of(*cores)).status is status


def test_binding_on_each_node_by_itself():
    cores = [1], [1], [2]
    assert checks.check_binding(facts_of(*cores, nodes=[0, 1, 1])).status is OK
    row = checks.check_binding(facts_of(*cores, nodes=[0, 0, 2]))
    assert "ranks 0-1 on core 1" in row.found


def test_two_threads_of_one_core():
    row = checks.check_binding(facts_of([0], [4], physical=[0]))
    assert row.status is WARN
    assert "ranks 0-1" in row.found


def test_threads():
    def check(ranks, threads):
        return checks.check_threads(facts_of(*[range(8)] * ranks, threads=threads))

    assert check(2, "OMP_NUM_THREADS=4,2").status is OK
    row = check(3, "OMP_NUM_THREADS=4,2")
    assert "12 threads of ranks 0-2" in row.found
    assert "OMP_NUM_THREADS=2" in row.remedy
    assert check(1, "").status is OK
    assert check(1, "MKL_NUM_THREADS=\u0663").status is WARN


@pytest.mark.parametrize(
    ("free_bytes", "status"), [(4 << 30, OK), (100 << 20, WARN), (1 << 20, FAIL)]
)
def test_shared_memory(tmp_path, monkeypatch, free_bytes, status):
    size = SimpleNamespace(f_frsize=1, f_blocks=free_bytes, f_bavail=free_bytes)
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    assert checks.check_memory(2, tmp_path)[0].status is status
    assert checks.check_memory(2, tmp_path / "no")[0].status is FAIL


def test_launchers(monkeypatch):
    def check(size, error="", **environ):
        return checks.check_launcher(size, environ, error)

    well = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    assert check(2, **well).status is OK
    row = check(1, "start it with srun", **well)
    assert row.status is FAIL
    assert row.remedy == "start it with srun"
    row = check(5, **well)
    assert row.status is WARN
    assert "PMI_SIZE=2" in row.found
    row = check(1, **well, MPIDIST_ALLOW_SINGLETON="1")
    assert row.status is WARN
    assert "MPIDIST_ALLOW_SINGLETON" in row.remedy
    assert check(1).status is OK
    assert check(2).status is OK


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_RANK": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "1"},
        {"PMI_RANK": "x", "PMI_SIZE": "2"},
        # An mpirun in a Slurm job knows better
        {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
        | {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALNRANKS": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "2", "MPIDIST_ALLOW_SINGLETON": "1"},
    ],
)
def test_who_speaks(environ):
    """Who is silent: `test_launchers.py`."""
    assert is_silent(environ) is False


def test_mpi_and_nodes():
    statuses = [checks.check_thread_level(level).status for level in range(4)]
    assert statuses == [FAIL, FAIL, WARN, OK]
    assert checks.check_nodes(facts_of([0], [1])).status is OK
    row = checks.check_nodes(facts_of([0], [1], [2], nodes=[0, 0, 2]))
    assert row.status is WARN
    assert "1, 2" in row.found
    assert checks.check_nodes(facts_of([0], nodes=[None])) == []


def test_versions():
    (check_python,) = checks.LOCAL_CHECKS["Python"]
    python, path, package = check_python()
    assert (python.unlike, path.unlike, package.unlike) == (FAIL, WARN, FAIL)
    assert path.found.startswith(f"{sys.executable} ({python.found.split()[0]}.")


def test_environments_that_differ():
    facts = facts_of([0], MPIDIST_BANNER="0", FI_PROVIDER="x" * 500)
    rows = checks.check_variables({**facts, 1: facts_of([0])[0]})
    assert [row.status for row in rows] == [WARN, WARN]
    assert all(len(row.found) < 120 for row in rows)
    facts = facts_of([0], [1], FI_PROVIDER="tcp")
    assert [row.status for row in checks.check_variables(facts)] == [OK]


def test_settings_with_which_no_strategy_could_be_made():
    facts = facts_of([0], [1], MPIDIST_BANER="0", MPIDIST_LOG="loud")
    unknown, bad = checks.check_variables(facts)
    assert (unknown.status, bad.status) == (FAIL, FAIL)
    assert "did you mean MPIDIST_BANNER" in unknown.found
    assert "must be debug, info" in bad.found


def by_subject(tried):
    rows, locks = tried
    return {row.what: row for row in rows}, locks


def test_a_path(tmp_path):
    """It is tried in this process, which then has its locks to give back."""
    where = str(tmp_path)
    rows, locks = by_subject(paths.try_path(where, is_writer=True, is_holder=False))
    assert {what: row.status for what, row in rows.items()} == {
        where: OK,
        f"{where}: writing": OK,
    }
    assert locks == {}
    assert list(tmp_path.iterdir()) == []
    rows, _ = by_subject(paths.try_path(where, is_writer=False, is_holder=False))
    assert rows.keys() == {where}
    assert rows[where].unlike is WARN  # other ranks should have the same file system
    for bad, error in [("/nothing/there", errno.ENOENT), ("a\0b", None)]:
        (row,), _ = paths.try_path(bad, is_writer=True, is_holder=True)
        assert (row.status, row.what) == (FAIL, bad)
        assert error is None or row.found == os.strerror(error)


@pytest.mark.parametrize(
    ("module", "name", "number", "status"),
    [
        (os, "fsync", errno.EIO, FAIL),
        (paths.tempfile, "mkstemp", errno.EROFS, WARN),
        (paths.tempfile, "mkstemp", errno.ENOSPC, FAIL),
    ],
)
def test_a_folder_that_cannot_be_written(
    tmp_path, monkeypatch, module, name, number, status
):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, name, refuse)
    rows, locks = by_subject(paths.try_path(str(tmp_path), True, True))
    row = rows[f"{tmp_path}: writing"]
    assert row.status is status
    assert os.strerror(number) in row.found
    assert ("fsync of a file" in row.found) == (name == "fsync")
    assert locks == {}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_little_room(tmp_path, monkeypatch):
    size = SimpleNamespace(f_frsize=1, f_blocks=1 << 40, f_bavail=1 << 30)
    monkeypatch.setattr(os, "statvfs", lambda _: size)
    rows, _ = by_subject(paths.try_path(str(tmp_path), True, False))
    assert rows[f"{tmp_path}: writing"].status is WARN
    assert "0% of 1,024.0 GiB free" in rows[f"{tmp_path}: writing"].found


def test_locks_are_seen_by_another_process_and_given_back(tmp_path):
    # As on a file system whose locks do nothing
    open(tmp_path / "fcntl", "w").close()
    loose = {"fcntl": (str(tmp_path / "fcntl"), "")}
    with paths.try_paths([str(tmp_path)], SOON, True, True) as (rows, locks):
        assert [row.status for row in rows] == [OK, OK]
        held = locks[str(tmp_path)]
        assert [refused for _, refused in held.values()] == ["", ""]
        calls = [(paths.see_locks, held), (paths.see_locks, loose)]
        first, second = run_checks(calls, SOON)
        (row,) = paths.try_locks(locks, SOON)
    assert first == dict.fromkeys(paths.KINDS, HELD)
    assert second == {"fcntl": MISSED}
    assert (row.status, row.what) == (OK, f"{tmp_path}: locks")
    assert [path.name for path in tmp_path.iterdir()] == ["fcntl"]
    refused = {"HDF5": ("/d/h", "ENOTSUP: Operation not supported")}
    assert paths.see_locks(refused) == {"HDF5": "ENOTSUP: Operation not supported"}


@pytest.mark.parametrize(
    ("kind", "state", "locking", "expected"),
    [
        ("HDF5", "ENOLCK: No locks available", None, FAIL),
        ("fcntl", "ENOSYS: Function not implemented", None, WARN),
        ("fcntl", MISSED, None, WARN),
        ("HDF5", MISSED, None, WARN),
        ("HDF5", MISSED, "FALSE", OK),
        ("fcntl", HIDDEN, None, WARN),
    ],
)
def test_locks_that_do_not_hold(kind, state, locking, expected):
    states = {**dict.fromkeys(paths.KINDS, HELD), kind: state}
    row = paths.check_locks(states, locking)
    assert row.status is expected
    assert kind in row.found or state == HIDDEN
    assert state in (MISSED, HIDDEN) or state in row.found
    assert ("does not lock" in row.found) == (locking == "FALSE")


def test_gpus(monkeypatch):
    def check(find_spec, driver, count=lambda: 0):
        monkeypatch.setattr(checks.importlib.util, "find_spec", lambda _: find_spec)
        monkeypatch.setattr(checks, "_GPU_DEVICES", (driver,))
        monkeypatch.setattr(binding, "gpu_count", count)
        return checks.check_gpus()

    def broken():
        raise ImportError("libcudart.so.12 is missing")

    (row,) = check(None, "/no")
    assert row == Row(OK, "none (CuPy is not installed)")
    (row,) = check(None, "/dev/null")
    assert row.status is WARN
    assert "there is an NVIDIA driver, but CuPy is not installed" in row.found
    (row,) = check("cupy", "/no", broken)
    assert row.status is FAIL
    assert "libcudart.so.12" in row.found
    (row,) = check("cupy", "/no")
    assert row == Row(OK, "none (CuPy sees none)")
    gpu = binding.GpuIdentity("", "0000:3b:00.0", "ab", "H100", 12040)
    monkeypatch.setattr(binding, "identify_gpu", lambda *_: gpu)
    monkeypatch.setattr(binding, "cupy_version", lambda: "14.0")
    gpus, cuda = check("cupy", "/no", lambda: 2)
    assert gpus.found == "H100 0000:3b:00.0, H100 0000:3b:00.0"
    assert cuda == Row(
        OK, "CuPy 14.0, driver for CUDA 12.4", cuda.remedy, "CUDA", unlike=WARN
    )


@pytest.mark.parametrize(
    ("is_shared", "is_aware", "no_nccl", "forced", "status"),
    [
        (False, True, "no", "", OK),
        (False, False, "", "", OK),
        (False, False, "CuPy finds no NCCL", "", WARN),
        (False, True, "", "1", WARN),
        (True, True, "", "", OK),  # on purpose, or it would not have been created
    ],
)
def test_gpus_of_a_strategy(monkeypatch, is_shared, is_aware, no_nccl, forced, status):
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", forced)
    gpus = GpuFacts(0, (), is_shared, Support(is_aware, "why"), 0, no_nccl)
    row = check_strategy("2 replicas", gpus)
    assert row.status is status
    assert row.found.startswith("2 replicas")
    assert is_aware or no_nccl in row.found
    assert check_strategy("2 replicas", None).status is OK


def test_speed():
    assert check_speed(2, 5e-6, 1e-3, "shared", True).status is OK
    assert check_speed(2, 0.01, 1e-3, "shared", True).status is WARN
    row = check_speed(2, 5e-6, 1e-3, "shared", False)
    assert row.status is FAIL
    assert "WRONG" in row.found


ROWS = st.builds(Row, st.sampled_from(Status), st.text(), st.text(), st.text())


@given(st.lists(ROWS, min_size=1))
def test_any_row_can_be_printed(rows):
    lines = to_text(rows).splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[-1] == ", ".join(
        f"{sum(row.status is status for row in rows)} {status.name}"
        for status in Status
    )
