"""The report and `top`: right numbers, and pages that can be read."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import chromium
import pytest

from mpidist.errors import DataError
from mpidist.monitor import charts
from mpidist.monitor.page import PARTS, figure, page
from mpidist.monitor.report import report, scaling, slowest_rank, step_parts
from mpidist.monitor.timeline import status_path
from mpidist.monitor.top import table
from mpidist.monitor.trace_file import trace_path
from mpidist.monitor.trace_reader import read_statuses

STEPS = 40
JOB = f"""
import numpy as np
import mpidist
strategy = mpidist.MirroredStrategy(["CPU:0"])
rows = mpidist.Dataset.range({4 * STEPS}).batch(4)
for batch in strategy.experimental_distribute_dataset(rows):
    strategy.run(lambda x: mpidist.get_replica_context().all_reduce("SUM", np.ones(9)),
                 args=(batch,))
"""


@pytest.fixture
def folder(mpirun, tmp_path):
    """The folder of a small job of two ranks."""
    job = mpirun(2, JOB, MPIDIST_TIMELINE=str(tmp_path / "timeline"))
    assert job.returncode == 0, job.stderr
    return tmp_path / "timeline"


def edit(folder, number, /, **changes):
    path = status_path(folder, number)
    status = json.loads(path.read_text())
    for name, value in changes.items():
        if isinstance(value, dict):
            status[name].update(value)
        else:
            status[name] = value
    path.write_text(json.dumps(status))


def make_slow(folder, rank=1):
    for one in (0, 1):
        parts = {name: 0.0 for name in PARTS if name not in ("transfer", "waiting")}
        is_slow = one == rank
        parts |= {"compute": 0.3 if is_slow else 0.1}
        parts |= {"communication": 0.02 if is_slow else 0.22}
        waiting = 0.01 if is_slow else 0.21
        step = {"mean": 0.32 / (STEPS - 1)}
        edit(
            folder,
            one,
            parts=parts,
            waiting_seconds=waiting,
            measured_seconds=0.32,
            step_seconds=step,
            waiting_for={} if is_slow else {str(rank): 0.2},
        )


class Checker(HTMLParser):
    """Sees that tags are closed in order, and counts them."""

    EMPTY = {"meta"}

    def __init__(self):
        super().__init__()
        self.open, self.count = [], {}

    def handle_starttag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in self.EMPTY:
            self.open.append(tag)
        for name, value in attributes:
            assert name not in ("src", "href"), value

    def handle_startendtag(self, tag, attributes):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check(page):
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert "http" not in page
    return checker.count


def test_the_page_of_a_job(folder):
    page = report(folder)
    count = check(page)
    assert count["svg"] == 3
    assert f"<b>{STEPS}</b>" in page
    assert "rank\u00a00" in page
    assert "rank\u00a01" in page
    assert "all_reduce" in page


def test_parts_make_a_step(folder):
    for status in read_statuses(folder):
        parts = step_parts(status)
        assert set(parts) == set(PARTS)
        assert sum(parts.values()) == pytest.approx(status["step_seconds"]["mean"])


def test_the_slowest_rank_is_marked(folder):
    make_slow(folder)
    statuses = read_statuses(folder)
    assert slowest_rank(statuses) == 1
    page = report(folder)
    assert '>rank\u00a01<span class="mark">slowest</span>' in page
    assert "takes 3.0 times as long" in page.replace("\n", " ")
    assert "slowest" in table(statuses, statuses[0]["time"]).splitlines()[3]


@pytest.mark.slow
def test_names_cannot_break_the_page(folder):
    name = '<script>alert("x")</script> & more'
    operation = {"calls": 1, "seconds": 1, "waiting_seconds": 0, "bytes": {name: 9}}
    edit(folder, 0, host=name, operations={name: operation})
    page = report(folder)
    assert "<script" not in page
    check(page)


def test_scaling(folder):
    make_slow(folder)
    statuses = read_statuses(folder)
    places, speeds, ideal = scaling(statuses)
    assert places == [1, 2, 4, 8]
    assert speeds[places.index(2)] == pytest.approx(1)
    assert ideal == [0.5, 1, 2, 4]
    assert all(s <= i * 1.001 for s, i in zip(speeds[1:], ideal[1:]))


def copy_ranks(folder, ranks):
    for rank in range(2, ranks):
        shutil.copy(trace_path(folder, 0), trace_path(folder, rank))
        shutil.copy(status_path(folder, 0), status_path(folder, rank))
        host = "a-node-with-a-long-name-0123.cluster.example.org"
        edit(folder, rank, rank=rank, host=host)
    for rank in range(ranks):
        edit(folder, rank, ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 768, 1200])
@pytest.mark.parametrize("is_dark", [False, True])
def test_no_text_overlaps_another_in_a_browser(folder, tmp_path, width, is_dark):
    if chromium.find() is None:
        pytest.skip("Chromium is not installed")
    make_slow(folder)
    copy_ranks(folder, 20)
    name = "a collective with a name that is a good deal longer than others"
    operation = {"calls": 10**7, "seconds": 1, "waiting_seconds": 0.3, "bytes": {}}
    edit(folder, 0, operations={name: operation}, first_step_seconds=1234.5)
    found = chromium.look(report(folder), tmp_path, width, is_dark)
    assert found["wrong"] == []
    assert found["texts"] > 100
    assert found["loaded"] == []
    assert found["inner"] == 0
    assert found["paper"] == ("rgb(20, 24, 29)" if is_dark else "rgb(255, 255, 255)")


@pytest.mark.slow
@pytest.mark.parametrize("count", [9_999, 87_654, 765_432, 36_000_000])
def test_large_numbers_have_room(tmp_path, count):
    if chromium.find() is None:
        pytest.skip("Chromium is not installed")
    shown = [
        charts.histogram("steps", [(0.001, 0.002, 7), (0.002, 0.004, count)]),
        charts.stacked("steps", [1, count // 2, count], [("input", [1e-3, 1.7])]),
        charts.lines("ranks", [1, 4096], [("ideal", [1.0, count])], 1, "speed by now"),
    ]
    text = page("numbers", "", "".join(figure("one", "", chart) for chart in shown))
    assert chromium.look(text, tmp_path, 360)["wrong"] == []


@pytest.mark.slow
def test_a_browser_sees_what_overlaps(tmp_path):
    if chromium.find() is None:
        pytest.skip("Chromium is not installed")
    page = """<svg viewBox="0 0 100 50" width="100"><text x="5" y="20">one</text>
    <text x="8" y="22">two</text><text x="95" y="40">three</text></svg>"""
    found = chromium.look(f"<html><body>{page}</body></html>", tmp_path, 360)
    assert any("overlap: one | two" in text for text in found["wrong"])
    assert any("cut off: three" in text for text in found["wrong"])


def command(*arguments):
    run = [sys.executable, "-m", "mpidist", *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True, check=False)


def test_the_commands(folder, tmp_path):
    page, trace = tmp_path / "page.html", tmp_path / "trace.json.gz"
    made = command("report", folder, "-o", page, "--trace", trace)
    assert made.returncode == 0, made.stderr
    assert page.read_text() == report(folder)
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    shown = command("top", folder, "--once")
    assert shown.returncode == 0
    assert f"2 ranks, ended; {STEPS} steps" in shown.stdout
    assert shown.stdout.count("\nrank ") == 2
    # The job has ended, so it does not wait for more
    assert command("top", folder).returncode == 0


@pytest.mark.parametrize("name", ["report", "top"])
def test_commands_without_a_timeline(tmp_path, name):
    failed = command(name, tmp_path)
    assert failed.returncode == 1
    assert "MPIDIST_TIMELINE" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_commands_need_no_mpi(folder):
    code = (
        "import sys, mpidist.launch.commands as c; c.is_command = lambda: True\n"
        "sys.modules['mpi4py'] = None\n"
        "from mpidist.__main__ import main\n"
        f"sys.exit(main(['top', {str(folder)!r}, '--once']))"
    )
    script = (
        "import sys, types\n"
        "package = types.ModuleType('mpidist')\n"
        f"package.__path__ = [{str(Path(charts.__file__).parents[1])!r}]\n"
        "sys.modules['mpidist'] = package\n" + code
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_top_of_a_job_that_runs(folder):
    statuses = read_statuses(folder)
    now = statuses[0]["time"]
    for one in statuses:
        one["state"] = "running"
    assert "2 ranks, running;" in table(statuses, now)
    assert "silent, perhaps killed" in table(statuses, now + 1000)
    statuses[0]["began"] += 7200  # the clock was set back an hour or two
    statuses[0]["seconds"] = 90.0
    assert f"{STEPS} steps in 90 s" in table(statuses, now)
    assert "1 not seen yet" in table(statuses[:1], now)
    assert len(table(statuses, now, 60, 6).splitlines()) == 3
    for line in table(statuses, now, 60).splitlines()[2:]:
        assert len(line) <= 80


@pytest.mark.slow
def test_files_of_an_earlier_job_are_left_out(folder):
    edit(folder, 1, job="another", began=1.0)
    assert [one["rank"] for one in read_statuses(folder)] == [0]
    check(report(folder))


def test_a_damaged_folder(folder):
    trace_path(folder, 0).write_bytes(b"no gzip")
    check(report(folder))
    status_path(folder, 7).write_text("[1]")
    status_path(folder, 8).write_text('{"a": 1}')
    check(report(folder))
    trace_path(folder, 1).write_bytes(gzip.compress(b'[\n{"a": 1},\n'))
    with pytest.raises(DataError, match="has no timeline"):
        report(folder)
    trace_path(folder, 1).write_bytes(gzip.compress(b'[\n{"name": "clock"},\n'))
    with pytest.raises(DataError, match="is not a timeline"):
        report(folder)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (3, "3"), (16.64, "16.6"), (0.01234, "0.0123"), (1500, "1,500")],
)
def test_quantities(number, text):
    assert charts.quantity(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (900, "900"),
        (1500, "1.5k"),
        (36e6, "36M"),
        (2e9, "2G"),
    ],
)
def test_numbers_at_ticks_are_short(number, text):
    assert charts.tick_text(number) == text


@pytest.mark.parametrize("most", [0.0, 1e-9, 0.31, 1.0, 7.2, 999, 12345.6])
def test_ticks_are_round_and_reach_the_most(most):
    ticks = charts._ticks(most)
    assert ticks[-1] >= most * 0.999
    assert 2 <= len(ticks) <= 8
    assert ticks[0] == 0
