"""Measured tables of transports: written, found, obeyed, and refused where broken."""

import itertools
import json
import math
import re
import sys
from pathlib import Path

import launching
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpidist
from mpidist.comm.transports.tuning import (
    METHODS,
    Layout,
    find_table,
    short_name,
    table_path,
    write_table,
)
from mpidist.options import CommunicationImplementation as How
from mpidist.tools.tune import (
    Timing,
    choose_rows,
    describe,
    is_clear,
    name_at,
    tune,
)

LAYOUT = Layout("MPICH 5.0.2", (2, 4), "CPU")
TABLE = {key: [(0, "mpi"), (1000, "shared")] for key in METHODS}


@pytest.fixture
def path(mpi_tmp_path, monkeypatch):
    """A file that strategies of all ranks take their tables from."""
    path = mpi_tmp_path / "transports.json"
    monkeypatch.setenv("MPIDIST_TRANSPORTS", str(path))
    return path


def own_layout(comm):
    return Layout(short_name(MPI.Get_library_version()), (comm.size,), "CPU")


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release...", "MPICH Version: 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI root@x", "Open MPI v5.0.11"),
        (
            "Intel(R) MPI Library 2021.17 for ...\n",
            "Intel(R) MPI Library 2021.17 for ...",
        ),
        ("HPE Cray MPICH\0", "HPE Cray MPICH"),
    ],
)
def test_libraries_have_short_names(library, name):
    assert short_name(library) == name


def test_where_tables_are():
    home = Path.home() / ".config/mpidist/transports.json"
    assert table_path({}) == home
    assert table_path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/mpidist/transports.json")
    environ = {"MPIDIST_TRANSPORTS": "/t.json", "XDG_CONFIG_HOME": "/x"}
    assert table_path(environ) == Path("/t.json")


def test_tables_are_written_beside_others(tmp_path):
    path = tmp_path / "new" / "transports.json"
    assert find_table(path, LAYOUT) is None
    other = LAYOUT._replace(node_sizes=(8,))
    write_table(path, LAYOUT, {key: [(0, "mpi")] for key in METHODS}, {})
    write_table(path, other, {key: [(0, "shared")] for key in METHODS}, {"date": "x"})
    write_table(path, LAYOUT, TABLE, {"host": "y"})
    assert find_table(path, LAYOUT) == TABLE
    assert find_table(path, other)["broadcast"] == [(0, "shared")]
    assert find_table(path, LAYOUT._replace(device="GPU")) is None
    assert [p.name for p in path.parent.iterdir()] == ["transports.json"]


@pytest.mark.mpi(min_size=2)
def test_a_transport_that_is_not_there_is_an_error_on_all(comm, path):
    if comm.rank == 0:
        table = {key: [(0, "mpi"), (10, "pigeons")] for key in METHODS}
        write_table(path, own_layout(comm), table, {})
    comm.Barrier()
    with pytest.raises(mpidist.LaunchError, match=r"names \['pigeons'\]"):
        mpidist.MirroredStrategy(communicator=comm)


@pytest.mark.mpi(min_size=2)
def test_only_rank_0_reads_the_file(comm, path, monkeypatch, make_strategy):
    if comm.rank:
        monkeypatch.setenv("MPIDIST_TRANSPORTS", "/does/not/exist")
    else:
        write_table(path, own_layout(comm), {key: [(0, "mpi")] for key in METHODS}, {})
    strategy = make_strategy()
    assert strategy.extended.collectives.transport.name == "mpi"


@pytest.mark.mpi(min_size=2)
def test_tables_are_obeyed(comm, path, monkeypatch, make_strategy):
    if comm.rank == 0:
        table = {key: [(0, "shared"), (400000, "mpi")] for key in METHODS}
        write_table(path, own_layout(comm), table, {})
    comm.Barrier()
    strategy = make_strategy()
    collectives = strategy.extended.collectives
    used = []
    for name, way in collectives.transports.by_name.items():
        for method in METHODS:
            monkeypatch.setattr(way, method, spy(used, name, getattr(way, method)))
    for count, name in ((30_000, "shared"), (60_000, "mpi")):
        used.clear()
        value = np.arange(count) + comm.rank
        total = strategy.reduce("SUM", value)
        assert np.array_equal(
            total, comm.size * np.arange(count) + sum(range(comm.size))
        )
        strategy.extended.broadcast_from_first("test", value)
        if count * comm.size * 8 >= 400_000:
            strategy.gather(value, axis=0)
        assert name in used
        other = {"shared": "mpi", "mpi": "shared"}[name]
        if name == "shared":
            assert other not in used or count * comm.size * 8 >= 400_000


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reducing", ["mpi", "shared"])
def test_sums_in_order_stay_in_shared_memory(comm, path, reducing, make_strategy):
    """Whatever the table says of other sizes and other calls."""
    if comm.rank == 0:
        table = {key: [(0, "mpi")] for key in METHODS}
        table["allreduce"] = [(0, reducing), (1 << 30, "shared")]
        write_table(path, own_layout(comm), table, {})
    comm.Barrier()
    strategy = make_strategy()
    transports = strategy.extended.collectives.transports
    names = {
        (how, ordered): transports.pick(How[how], ordered, is_device=False).name
        for how in ("AUTO", "MPI")
        for ordered in (False, True)
    }
    default = "mpi, shared"
    assert names["AUTO", False] == default
    assert names["AUTO", True] == (default if reducing == "shared" else "shared")
    assert names["MPI", False] == "mpi"
    assert names["MPI", True] == "ordered"


def spy(used, name, fn):
    def call(*args):
        used.append(name)
        return fn(*args)

    return call


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("ranks_per_node", [None, "1", "2"])
def test_what_is_measured_is_used(comm, path, monkeypatch, ranks_per_node):
    if ranks_per_node:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", ranks_per_node)
    monkeypatch.setattr(
        "mpidist.tools.tune.MirroredStrategy", lambda: strategy_of(comm)
    )
    found = tune(path, 1 << 12, 1, math.inf)
    if comm.size == 1:
        assert "table" not in found
        assert not path.exists()
        return
    assert found["sizes_bytes"] == [1 << n for n in range(3, 13)]
    for method in METHODS:
        assert found["table"][method][0][0] == 0
        for seconds in found["seconds"][method].values():
            assert len(seconds) == 10
            assert all(s > 0 for s in seconds)
    comm.Barrier()
    assert find_table(path, found["layout"]) == found["table"]
    strategy = strategy_of(comm)
    used = {name for rows in found["table"].values() for _, name in rows}
    assert set(strategy.extended.collectives.transport.name.split(", ")) == used
    assert strategy.reduce("SUM", 1) == comm.size
    strategy.experimental_finalize()


def strategy_of(comm):
    return mpidist.MirroredStrategy(communicator=comm)


TIMES = st.builds(Timing, st.floats(1, 9), st.floats(0, 0.5))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=9), st.data())
def test_rows_change_only_where_another_transport_wins_by_more_than_noise(times, data):
    sizes = [8 << j for j in range(len(times))]
    timings = {"a": [a for a, _ in times], "b": [b for _, b in times]}
    edge = data.draw(st.sampled_from([0, *sizes[1:]]))
    former = [(0, "a"), (edge, "b")] if edge else [(0, "b")]
    rows = choose_rows(sizes, timings, former)
    assert rows[0][0] == 0
    assert [e for e, _ in rows] == sorted({e for e, _ in rows})
    assert all(x[1] != y[1] for x, y in itertools.pairwise(rows))
    for size, (a, b) in zip(sizes, times):
        old, name = name_at(former, size), name_at(rows, size)
        chosen, other = (a, b) if name == "a" else (b, a)
        assert not is_clear(other, chosen)
        if name != old:
            assert chosen.seconds < other.seconds
            assert is_clear(chosen, other)
    # What was chosen stays when the same is measured again
    assert choose_rows(sizes, timings, rows) == rows


def test_noise_and_small_gains_change_nothing():
    def chosen(a, b):
        return choose_rows([8], {"a": [Timing(*a)], "b": [Timing(*b)]}, [(0, "a")])

    assert chosen((1.0, 0.3), (0.6, 0.2)) == [(0, "a")]
    assert chosen((1.0, 0.1), (0.6, 0.1)) == [(0, "b")]
    assert chosen((1.0, 0.0), (0.98, 0.0)) == [(0, "a")]


def test_what_does_not_repeat_changes_nothing():
    def chosen(a, b):
        timings = {"a": [Timing(1.0, 0.0, a)], "b": [Timing(0.5, 0.0, b)]}
        return choose_rows([8], timings, [(0, "a")])

    assert chosen((1.0, 1.0), (0.5, 0.5)) == [(0, "b")]
    assert chosen((1.0, 0.4), (0.5, 0.5)) == [(0, "a")]


@pytest.mark.mpi(min_size=2)
def test_a_busy_machine_is_not_measured(comm, path, monkeypatch):
    monkeypatch.setattr(
        "mpidist.tools.tune.MirroredStrategy", lambda: strategy_of(comm)
    )
    found = tune(path, 16, 3, most_noise=-1.0)
    assert not found["is_written"]
    assert not path.exists()
    assert "Layout" not in "".join(describe(found, path))


def test_one_rank_writes_nothing(tmp_path):
    """It has no transports to compare, and says how it is meant."""
    output = tmp_path / "t.json"
    command = [sys.executable, "-m", "mpidist", "tune", "--output", str(output)]
    done = launching.run(command)
    assert done.returncode == 1
    assert "one rank has no transports to compare: mpidist run -n 8" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.mpirun
def test_the_command_prints_times_and_what_it_wrote(tmp_path):
    output = tmp_path / "t.json"
    command = [*launching.mpirun_command(2), sys.executable, "-m", "mpidist", "tune"]
    command += [
        "--output",
        str(output),
        "--largest-bytes",
        "64",
        "--repetitions",
        "3",
        "--force",
    ]
    done = launching.run(command)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(output.read_text())["tables"]
    assert entry["node_sizes"] == [2]
    for method in METHODS:
        (title,) = re.findall(rf"^ *{method} .*used, gain$", done.stdout, re.M)
        assert {*entry["seconds"][method]} <= {*title.split()}
        for name in entry["seconds"][method]:
            assert len(entry["noise_seconds"][method][name]) == 4
    assert (
        len(re.findall(r"^ *(?:8|16|32|64) bytes +[\d.]+ \+-", done.stdout, re.M)) == 12
    )
    assert f"{output}: Layout(" in done.stdout
