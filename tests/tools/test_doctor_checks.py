"""What the doctor makes of facts: which are well, which are not, whom it names."""

from __future__ import annotations

import errno
import mmap
import os
import select
import signal
import subprocess
from pathlib import Path

import launching
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.tools.doctor import file_systems
from mpidist.tools.doctor.children import Child, run_checks
from mpidist.tools.doctor.evaluate import RankFacts, evaluate
from mpidist.tools.doctor.file_systems import PathFacts, look, write
from mpidist.tools.doctor.gpu_checks import (
    GpuChoice,
    GpuFacts,
    check_gpus,
    check_support,
)
from mpidist.tools.doctor.node_checks import (
    LaunchFacts,
    NodeFacts,
    check_binding,
    check_launcher,
    check_memory,
    check_mpi,
    check_nodes,
    check_threads,
    count_left,
    find_launched,
    is_silent,
)
from mpidist.tools.doctor.path_checks import PathReport, check_path
from mpidist.tools.doctor.process_checks import (
    PythonFacts,
    check_environment,
    check_python,
)
from mpidist.tools.doctor.rank_job import Speed, check_speed
from mpidist.tools.doctor.results import (
    CheckResult,
    Failure,
    Status,
    by_rank,
    name_each,
    name_ranks,
    to_text,
)
from mpidist.util.mounts import Mount

OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL
GIB = 1 << 30


def statuses(rows):
    return [row.status for row in rows]


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
    assert name_each({3: "a"}) == "rank 3: a"
    assert by_rank(dict(enumerate("abcdefgh"))).endswith("; and 2 more")


def test_looking_and_writing(tmp_path):
    found = look(str(tmp_path))
    assert found.error == ""
    assert found.folder == str(tmp_path.resolve())
    assert found.size_bytes >= found.free_bytes >= 0
    assert write(str(tmp_path)) == (0, "")
    assert list(tmp_path.iterdir()) == []
    assert look("/nothing/there").error == os.strerror(errno.ENOENT)
    assert look("a\0b").error
    assert write(str(tmp_path / "no"))[0] == -errno.ENOENT


def test_checks_that_crash_block_and_raise_do_so_alone():
    soon = launching.HANG_SECONDS
    calls = [(os.abort,), None, (os.getppid,), (os.strerror, "x"), (os._exit, 3)]
    killed, nothing, parent, raised, ended = run_checks(calls, soon)
    assert killed.text.startswith("the process was ended by SIGABRT")
    assert nothing is None
    assert parent == os.getpid()
    assert raised.text.startswith("TypeError: 'str' object cannot be")
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


def test_locks_are_seen_by_another_process_and_given_back(tmp_path):
    soon = launching.HANG_SECONDS
    # As on a file system whose locks do nothing
    names = {kind: (str(tmp_path / kind), "") for kind in ("fcntl", "flock")}
    for name, _ in names.values():
        open(name, "w").close()
    with Child(file_systems.hold, str(tmp_path)) as holder:
        held = holder.result(soon)
        assert all(refused == "" for _, refused in held.values())
        calls = [(file_systems.see, held), (file_systems.see, names)]
        first, second = run_checks(calls, soon)
    assert first == dict.fromkeys(file_systems.KINDS, file_systems.HELD)
    assert set(second.values()) == {file_systems.MISSED}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fcntl", "flock"]


def node(
    cores, machine=8, variable=("", ""), shared=4 * GIB, siblings=None, left=(0, 0)
):
    return NodeFacts(
        tuple(cores),
        machine,
        tuple(siblings or cores),
        variable,
        shared,
        shared,
        left,
        {},
    )


def test_files_that_mpi_has_left_are_counted(tmp_path):
    """Those that no process has open; the rest is somebody else's, or in use."""
    for name in ("mpich_shm_1_0", "sm_segment.a.0", "mpich_shm_2_0", "others"):
        (tmp_path / name).write_bytes(bytes(8192))
        os.utime(tmp_path / name, (0, 0))
    (tmp_path / "mpich_shm_3_0").write_bytes(b"a job starts")
    assert count_left(tmp_path, Path("/proc"))[0] == 3
    with (tmp_path / "mpich_shm_1_0").open("r+b") as file:
        assert count_left(tmp_path, Path("/proc"))[0] == 2
        mapped = mmap.mmap(file.fileno(), 0)
    assert count_left(tmp_path, Path("/proc")) == (2, 2 * 8192)
    mapped.close()
    rows = check_memory({0: node([0], left=(3, 5 * GIB))}, [[0]])
    (row,) = [row for row in rows if row.what == "left by MPI"]
    assert row.status is WARN
    assert row.found == "5.0 GiB in 3 files of ended jobs in /dev/shm"
    assert "fuser" in row.remedy


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
    facts = {rank: node(own) for rank, own in enumerate(cores)}
    (row,) = check_binding(facts, [list(facts)])
    assert row.status is status


def test_binding_on_each_node_by_itself():
    facts = {0: node([1]), 1: node([1]), 2: node([2])}
    assert statuses(check_binding(facts, [[0], [1, 2]])) == [OK]
    (row,) = check_binding(facts, [[0, 1], [2]])
    assert "ranks 0-1 on core 1" in row.found


def test_two_threads_of_one_core():
    facts = {0: node([0], siblings=[0]), 1: node([4], siblings=[0])}
    (row,) = check_binding(facts, [[0, 1]])
    assert row.status is WARN
    assert "ranks 0-1" in row.found


def test_threads():
    limited = node(range(8), variable=("OMP_NUM_THREADS", "4,2"))
    assert statuses(check_threads({0: limited, 1: limited}, [[0, 1]])) == [OK]
    (row,) = check_threads(dict.fromkeys(range(3), limited), [[0, 1, 2]])
    assert "12 threads of ranks 0-2" in row.found
    assert "OMP_NUM_THREADS=2" in row.remedy
    assert statuses(check_threads({0: node(range(8))}, [[0]])) == [OK]
    bad = node(range(8), variable=("MKL_NUM_THREADS", "\u0663"))
    assert statuses(check_threads({0: bad}, [[0]])) == [WARN]


@pytest.mark.parametrize(
    ("shared", "status"),
    [(4 * GIB, OK), (100 << 20, WARN), (1 << 20, FAIL), (-1, FAIL)],
)
def test_shared_memory(shared, status):
    facts = {rank: node([rank], shared=shared) for rank in range(2)}
    (row,) = check_memory(facts, [[0, 1]])
    assert row.status is status


def launch(size=2, node=0, rank=None, level=3, **more):
    (said,) = find_launched({"PMI_RANK": f"{rank or 0}", "PMI_SIZE": f"{size}"})
    facts = LaunchFacts(size, "h", node, "MPICH", "4.1", level, said, "", False, "")
    return facts._replace(**more)


def test_launchers():
    well = {0: launch(), 1: launch(rank=1)}
    assert statuses(check_launcher(well)) == [OK]
    assert "rank 1" in check_launcher(well | {1: launch(rank=0)})[0].found
    error = {0: launch(size=1, error="start it with srun")}
    (row,) = check_launcher(error)
    assert row.status is FAIL
    assert row.remedy == "start it with srun"
    (row,) = check_launcher({0: launch()._replace(size=5)})
    assert row.status is WARN
    assert "PMI_SIZE=2" in row.found
    assert statuses(check_launcher({0: launch(size=1, launched=None)})) == [OK]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, False),
        ({"PMI_RANK": "1"}, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "1"}, False),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, False),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, True),
        # An mpirun in a Slurm job knows better
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
            | {"PMI_RANK": "0", "PMI_SIZE": "1"},
            False,
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPIDIST_ALLOW_SINGLETON": "1"},
            False,
        ),
    ],
)
def test_who_speaks(environ, expected):
    assert is_silent(environ) is expected


def test_mpi_and_nodes():
    facts = {0: launch(), 1: launch(rank=1)}
    assert statuses(check_mpi(facts)) == [OK, OK]
    assert statuses(check_mpi(facts | {1: launch(level=2)})) == [OK, WARN]
    assert statuses(check_mpi(facts | {1: launch(level=0)})) == [OK, FAIL]
    assert statuses(check_mpi(facts | {1: launch(library="Open MPI")})) == [FAIL, OK]
    assert statuses(check_nodes(facts)) == [OK]
    three = facts | {2: launch(node=2, rank=2)}
    assert (
        "2, 1" in check_nodes(three)[0].found or "1, 2" in check_nodes(three)[0].found
    )
    assert statuses(check_nodes(three)) == [WARN]


def python(version="3.11.2 (CPython)", mpidist="1 in /a", numpy="2.0", **environment):
    packages = dict.fromkeys(("h5py", "mpi4py", "deflate", "optree"), "1")
    return PythonFacts(
        version, "/bin/python", mpidist, {**packages, "numpy": numpy}, environment
    )


@pytest.mark.parametrize(
    ("other", "what", "status"),
    [
        (python(), "", OK),
        (python("3.11.7 (CPython)"), "Python", WARN),
        (python("3.12.2 (CPython)"), "Python", FAIL),
        (python(mpidist="1 in /b"), "mpidist", FAIL),
        (python(numpy="1.26"), "numpy", FAIL),
        (python(numpy=Failure("not installed")), "numpy", FAIL),
    ],
)
def test_versions_that_differ(other, what, status):
    rows = check_python({0: python(), 1: other, 2: python()})
    bad = [row for row in rows if row.status is not OK]
    assert [(row.what, row.status) for row in bad] == ([(what, status)] if what else [])
    assert all("rank 1" in row.found for row in bad)


def test_environments_that_differ():
    facts = {0: python(MPIDIST_BANNER="0", FI_PROVIDER="x" * 500), 1: python()}
    rows = check_environment(facts)
    assert statuses(rows) == [WARN, WARN]
    assert all(len(row.found) < 120 for row in rows)
    assert statuses(check_environment({0: python(FI_PROVIDER="tcp")})) == [OK]


def test_settings_with_which_no_strategy_could_be_made():
    facts = {rank: python(MPIDIST_BANER="0", MPIDIST_LOG="loud") for rank in (0, 1)}
    unknown, bad = check_environment(facts)
    assert statuses([unknown, bad]) == [FAIL, FAIL]
    assert "did you mean MPIDIST_BANNER" in unknown.found
    assert "must be debug, info" in bad.found


EXT4 = PathFacts("", "/d", mount=Mount("/", "ext4", "/dev/sda", frozenset()))
WELL = PathReport(EXT4._replace(size_bytes=GIB, free_bytes=GIB), written=(0, ""))
HELD = {kind: (f"/d/{kind}", "") for kind in file_systems.KINDS}


def path_rows(changes, locking=None, held=HELD):
    """Return what is not OK: rank 0 holds the locks, rank 1 sees them."""
    first = WELL._replace(held=held)
    second = WELL._replace(
        written=None, seen=dict.fromkeys(file_systems.KINDS, file_systems.HELD)
    )
    reports = {0: first, 1: second._replace(**changes)}
    rows = check_path(reports, "/d", locking)
    return [(r.what, r.status, r.found) for r in rows if r.status is not OK]


def test_paths_on_all_ranks():
    assert path_rows({}) == []
    ((what, status, found),) = path_rows({"looked": Failure("no answer in 2 s")})
    assert (what, status, found) == ("/d", FAIL, "rank 1: no answer in 2 s")
    nfs = EXT4._replace(mount=Mount("/d", "nfs4", "s:/d", frozenset()))
    ((_, status, found),) = path_rows({"looked": nfs})
    assert status is WARN
    assert "rank 0: ext4" in found
    assert "rank 1: nfs4" in found
    ((what, status, _),) = path_rows({"written": (errno.EIO, "fsync of a file: bad")})
    assert (what, status) == ("/d: writing", FAIL)
    ((what, status, _),) = path_rows({"written": (-errno.EROFS, "Read-only")})
    assert (what, status) == ("/d: writing", WARN)
    ((_, status, _),) = path_rows({"written": (-errno.ENOSPC, "No space")})
    assert status is FAIL


@pytest.mark.parametrize(
    ("kind", "said", "locking", "expected"),
    [
        ("HDF5", "ENOLCK: No locks available", None, FAIL),
        ("flock", "ENOSYS: Function not implemented", None, WARN),
        ("fcntl", file_systems.MISSED, None, WARN),
        ("HDF5", file_systems.MISSED, None, WARN),
        ("HDF5", file_systems.MISSED, "FALSE", OK),
        ("flock", file_systems.HIDDEN, None, WARN),
    ],
)
def test_locks_that_do_not_hold(kind, said, locking, expected):
    seen = {**dict.fromkeys(file_systems.KINDS, file_systems.HELD), kind: said}
    rows = path_rows({"seen": seen}, locking)
    assert [status for _, status, _ in rows] == ([] if expected is OK else [expected])


def test_files_that_others_do_not_see_are_one_row():
    rows = path_rows({"seen": dict.fromkeys(file_systems.KINDS, file_systems.HIDDEN)})
    assert [(what, status) for what, status, _ in rows] == [("/d: locks", WARN)]


def test_locks_that_cannot_be_taken():
    held = {**HELD, "HDF5": ("/d/h", "ENOTSUP: Operation not supported")}
    ((_, status, found),) = path_rows({"seen": {"flock": file_systems.HELD}}, held=held)
    assert status is FAIL
    assert "ENOTSUP" in found
    ((_, status, _),) = path_rows({"seen": None}, held=Failure("no answer in 1 s"))
    assert status is FAIL


GPU = GpuFacts(
    "14.0", "", (("0000:3b:00.0", "ab", "H100"),), (13000, 13000), 22703, 1, ""
)
NO_GPU = GpuFacts("", "", (), (0, 0), 0, False, "")


def choice(pci="0000:3b:00.0", asked=(True, "it says so"), tried=(True, "tried")):
    return GpuChoice("h", 0, pci, "ab", "H100", asked, tried)


def test_gpus(monkeypatch):
    monkeypatch.delenv("MPIDIST_ALLOW_SHARED_GPU", raising=False)
    both = {0: GPU, 1: GPU}
    own = {0: choice(), 1: choice("0000:5e:00.0")}
    assert statuses(check_gpus(both, own)) == [OK, OK]
    (row, _) = check_gpus(both, {0: choice(), 1: choice()})
    assert row.status is FAIL
    assert "ranks 0-1 share one" in row.found
    monkeypatch.setenv("MPIDIST_ALLOW_SHARED_GPU", "1")
    assert statuses(check_gpus(both, {0: choice(), 1: choice()})) == [WARN, OK]
    (row,) = check_gpus({0: GPU, 1: NO_GPU}, {0: choice(), 1: None})
    assert row.status is FAIL
    assert "rank 1" in row.found
    nobody = {0: None, 1: None}
    assert statuses(check_gpus(dict.fromkeys(nobody, NO_GPU), nobody)) == [OK]
    unused = NO_GPU._replace(has_device=True)
    assert statuses(check_gpus(dict.fromkeys(nobody, unused), nobody)) == [WARN]
    broken = NO_GPU._replace(cupy="broken", error="libcudart.so.12 is missing")
    assert statuses(check_gpus(dict.fromkeys(nobody, broken), nobody)) == [FAIL]


@pytest.mark.parametrize(
    ("asked", "tried", "has_nccl", "status"),
    [
        ((True, "yes"), (True, "tried"), False, OK),
        ((True, "yes"), (False, "it ended by SIGSEGV"), True, WARN),
        ((False, "no"), None, True, OK),
        ((False, "no"), None, False, WARN),
        (None, (True, "tried"), False, OK),
    ],
)
def test_cuda_support(monkeypatch, asked, tried, has_nccl, status):
    monkeypatch.delenv("MPIDIST_CUDA_AWARE", raising=False)
    choices = {0: choice(asked=asked, tried=tried), 1: choice(asked=asked, tried=None)}
    (row,) = check_support(choices, has_nccl)
    assert row.status is status
    assert tried is None or tried[1] in row.found
    monkeypatch.setenv("MPIDIST_CUDA_AWARE", "1")
    is_aware = tried is not None and tried[0]
    assert statuses(check_support(choices, has_nccl)) == [OK if is_aware else FAIL]
    assert check_support({0: None, 1: None}, has_nccl) == []


def test_speed():
    fast = Speed("CPU", 5e-6, 1e-3, "shared", True)
    assert check_speed(fast, 2).status is OK
    assert check_speed(fast._replace(latency_seconds=0.01), 2).status is WARN
    row = check_speed(fast._replace(is_right=False), 2)
    assert row.status is FAIL
    assert "WRONG" in row.found


def test_a_rank_that_failed_to_look_is_named():
    well = RankFacts(python(), Failure("no answer in 20 s"), NO_GPU)
    rows = evaluate(
        {0: well, 1: well, 2: RankFacts(Failure("x"), Failure("y"), NO_GPU)}, []
    )
    found = {row.what: row for row in rows}
    assert found["Python and packages"].found == "rank 2: x"
    assert found["h5py"].found == "ranks 0-1: no answer in 20 s; rank 2: y"


def test_a_check_that_fails_is_a_row():
    rows = evaluate({0: RankFacts("nonsense", NO_GPU, NO_GPU)}, [])
    bad = [row for row in rows if "itself failed" in row.found]
    assert bad
    assert all(row.status is FAIL for row in bad)


ROWS = st.builds(CheckResult, st.sampled_from(Status), st.text(), st.text(), st.text())


@given(st.lists(ROWS, min_size=1))
def test_any_row_can_be_printed(rows):
    lines = to_text(rows).splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[-1] == ", ".join(
        f"{sum(row.status is status for row in rows)} {status.name}"
        for status in Status
    )
