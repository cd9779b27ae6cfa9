"""The report: right numbers, and a page that can be read."""

import gzip
import html
import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import chromium
import pytest

from mpidist.errors import DataError
from mpidist.monitor.report import (
    PARTS,
    describe,
    page,
    scaling,
    slowest_rank,
    state,
    step_parts,
)
from mpidist.monitor.traces import read_statuses, status_path, trace_path

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


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tmp_path_factory.mktemp("job") / "timeline"


@pytest.fixture
def folder(mpirun, original, tmp_path):
    """A copy of the folder of a small job of two ranks."""
    if not original.exists():
        mpirun(2, JOB, MPIDIST_TIMELINE=str(original))
    return shutil.copytree(original, tmp_path / "timeline")


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


SAMPLE = {
    "subtitle": "2 ranks",
    "script": "",
    "command": "",
    "rank": 0,
    "steps": 9,
    "mean": dict.fromkeys(PARTS, 0.001),
    "findings": [],
    "series": {"edges": [1, 2], "parts": {name: [0.001] for name in PARTS}},
    "histogram": [(0.001, 0.002, 7)],
    "scaling": {"now": 1, "ranks": [1, 2], "estimate": [1, 1.5], "ideal": [1, 2]},
    "ranks": [{"rank": 0, "host": "a", "mark": "", "parts": dict.fromkeys(PARTS, 1)}],
    "ranks_note": "",
    "first_step": {"first": 2.0, "others": 1.0},
    "operations": [],
    "operations_note": "",
    "clocks": "",
}
NODE = """
const text = require("fs").readFileSync(0, "utf8");
const [data, script] =
  [...text.matchAll(/<script[^>]*>([^]*?)<\\/script>/g)].map(found => found[1]);
const document =
  { getElementById: () => ({ textContent: data }), querySelector: () => ({}) };
const result = new Function("document", script + ";return " + process.argv[1]);
console.log(JSON.stringify(result(document)));
"""


def evaluate(text, expression, folder):
    """Return what a JavaScript expression is at the end of a page's script."""
    if node := shutil.which("node"):
        run = [node, "-e", NODE, expression]
        done = subprocess.run(run, input=text.encode(), capture_output=True, check=True)
        return json.loads(done.stdout)
    if chromium.find() is None:
        pytest.skip("neither Node.js nor Chromium is installed")
    path = folder / "page.html"
    result = f"document.title = JSON.stringify({expression})"
    path.write_text(text.replace("</body>", f"<script>{result}</script></body>"))
    out = chromium.text_of(path.as_uri(), folder)
    return json.loads(html.unescape(re.search("<title>(.*?)</title>", out, re.S)[1]))


class Checker(HTMLParser):
    """Sees that tags are closed in order, and counts them."""

    EMPTY = {"meta"}

    def __init__(self):
        super().__init__()
        self.open, self.count, self.data = [], {}, ""

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

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.data = self.data or data


def parse(text):
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    assert "http" not in text
    return checker


def check(folder, tmp_path):
    """Return the content of the page of a folder, and how many tags it has."""
    data = describe(folder)
    text = page(data)
    whole = parse(text)
    assert json.loads(whole.data) == json.loads(json.dumps(data))
    assert whole.count["script"] == 2
    content = evaluate(text, "page(data).text", tmp_path)
    return content, parse(content).count


def test_the_page_of_a_job(folder, tmp_path):
    content, count = check(folder, tmp_path)
    assert count["svg"] == 3
    assert f"<b>{STEPS}</b>" in content
    assert "rank\u00a00" in content
    assert "rank\u00a01" in content
    assert "all_reduce" in content


def test_the_page_says_what_ran(mpirun, tmp_path):
    folder, script = tmp_path / "timeline", tmp_path / "train.py"
    script.write_text(JOB)
    mpirun(1, str(script), "--rate", "0.5 of <all>", MPIDIST_TIMELINE=str(folder))
    data = describe(folder)
    assert data["script"] == "train.py"
    assert data["command"].endswith(f"{script} --rate '0.5 of <all>'")
    assert data["command"].startswith("python")
    command = evaluate(page(data), "page(data).text", tmp_path).split("code>")[1]
    assert html.unescape(command) == f"{data['command']}</"
    heading = 'document.querySelector("h1").textContent + "|" + document.title'
    if shutil.which("node") is None:
        name = evaluate(page(data), heading, tmp_path)
        assert name == "Where the time of train.py went|train.py: where the time went"


def test_the_status_of_an_earlier_version(folder, tmp_path):
    for rank in (0, 1):
        path = status_path(folder, rank)
        status = json.loads(path.read_text())
        assert status.pop("command").startswith("python")
        del status["script"]
        path.write_text(json.dumps(status))
    content, _ = check(folder, tmp_path)
    assert "<code>" not in content


def test_the_page_of_a_job_without_steps(tmp_path):
    data = SAMPLE | {"series": None, "histogram": [], "mean": dict.fromkeys(PARTS, 0)}
    content = evaluate(page(data), "page(data).text", tmp_path)
    assert parse(content).count["svg"] == 2
    assert "No steps were recorded." in content
    assert "<b>0 us</b>" in content
    assert "NaN" not in content


def test_parts_make_a_step(folder):
    for status in read_statuses(folder):
        parts = step_parts(status)
        assert set(parts) == set(PARTS)
        assert sum(parts.values()) == pytest.approx(status["step_seconds"]["mean"])


def test_the_slowest_rank_is_marked(folder, tmp_path):
    make_slow(folder)
    statuses = read_statuses(folder)
    assert slowest_rank(statuses) == 1
    content, _ = check(folder, tmp_path)
    assert '>rank\u00a01<span class="mark">slowest</span>' in content
    assert "takes 3.0 times as long" in " ".join(content.split())


def test_a_rank_that_does_nothing_but_wait(folder):
    make_slow(folder)
    edit(folder, 0, parts={"compute": 0.0, "input": 0.0})
    assert (
        "own work takes longer than that of others" in describe(folder)["findings"][1]
    )


@pytest.mark.slow
def test_names_cannot_break_the_page(folder, tmp_path):
    name = '</script><script>alert("x")</script> & more'
    operation = {"calls": 1, "seconds": 1, "waiting_seconds": 0, "bytes": {name: 9}}
    edit(folder, 0, host=name, operations={name: operation})
    content, count = check(folder, tmp_path)
    assert "script" not in count
    assert "alert(" in content


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
    found = chromium.look(page(describe(folder)), tmp_path, width, is_dark)
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
    parts = {name: [1e-3, 1.7] for name in PARTS}
    data = SAMPLE | {
        "histogram": [(0.001, 0.002, 7), (0.002, 0.004, count)],
        "series": {"edges": [1, count // 2, count], "parts": parts},
        "scaling": {
            "now": 1,
            "ranks": [1, 4096],
            "estimate": [1.0, 1.0],
            "ideal": [1.0, count],
        },
    }
    assert chromium.look(page(data), tmp_path, 360)["wrong"] == []


@pytest.mark.slow
def test_a_browser_sees_what_overlaps(tmp_path):
    if chromium.find() is None:
        pytest.skip("Chromium is not installed")
    svg = """<svg viewBox="0 0 100 50" width="100"><text x="5" y="20">one</text>
    <text x="8" y="22">two</text><text x="95" y="40">three</text></svg>"""
    found = chromium.look(f"<html><body>{svg}</body></html>", tmp_path, 360)
    assert any("overlap: one | two" in text for text in found["wrong"])
    assert any("cut off: three" in text for text in found["wrong"])


def command(*arguments):
    run = [sys.executable, "-m", "mpidist", *map(str, arguments)]
    return subprocess.run(run, capture_output=True, text=True, check=False)


def test_the_command(folder, tmp_path):
    output, trace = tmp_path / "page.html", tmp_path / "trace.json.gz"
    made = command("report", folder, "-o", output, "--trace", trace)
    assert made.returncode == 0, made.stderr
    assert output.read_text() == page(describe(folder))
    assert json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    lines = made.stdout.splitlines()
    assert lines[0] == str(output)
    assert re.fullmatch(rf"2 ranks, [-\d]+ [\d:]+: {STEPS} steps", lines[1])
    assert lines[2].startswith("Rank 0: step ")


def test_the_command_without_a_timeline(tmp_path):
    failed = command("report", tmp_path)
    assert failed.returncode == 1
    assert "MPIDIST_TIMELINE" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_job_that_runs(folder):
    statuses = read_statuses(folder)
    now = statuses[0]["time"]
    assert state(statuses, now) == "ended"
    statuses[0]["state"] = "running"  # its last status is not written yet
    assert state(statuses, now) == "running"
    statuses[1]["state"] = "running"
    assert state(statuses, now) == "running"
    assert state(statuses, now + 1000) == "silent, perhaps killed"
    assert state(statuses[:1], now) == "running, 1 not seen yet"
    statuses[1]["time"] = now - 1000
    assert state(statuses, now) == "running, silent: rank 1"


@pytest.mark.slow
def test_files_of_an_earlier_job_are_left_out(folder, tmp_path):
    edit(folder, 1, job="another", began=1.0)
    assert [one["rank"] for one in read_statuses(folder)] == [0]
    check(folder, tmp_path)


def test_a_damaged_folder(folder, tmp_path):
    trace_path(folder, 0).write_bytes(b"no gzip")
    check(folder, tmp_path)
    status_path(folder, 7).write_text("[1]")
    status_path(folder, 8).write_text('{"a": 1}')
    check(folder, tmp_path)
    with trace_path(folder, 1).open("ab") as file:  # a step without times
        numbers = ("step", "one_of", "input", "communication", "waiting", "checkpoint")
        event = {"name": "step", "ph": "i", "pid": 1, "cat": "step"}
        event["args"] = dict.fromkeys(numbers, 1)
        file.write(gzip.compress(json.dumps(event).encode() + b",\n"))
    check(folder, tmp_path)
    trace_path(folder, 1).write_bytes(gzip.compress(b'[\n{"a": 1},\n'))
    with pytest.raises(DataError, match="has no timeline"):
        describe(folder)
    trace_path(folder, 1).write_bytes(gzip.compress(b'[\n{"name": "clock"},\n'))
    with pytest.raises(DataError, match="is not a timeline"):
        describe(folder)


@pytest.mark.parametrize(
    ("function", "texts"),
    [
        (
            "quantity",
            {0: "0", 3: "3", 16.64: "16.6", 0.01234: "0.0123", 1500: "1,500"}
            | {1e-30: "0", -2.5: "-2.5"},
        ),
        (
            "tickText",
            {0: "0", 0.25: "0.25", 900: "900", 1500: "1.5k", 36e6: "36M", 2e9: "2G"},
        ),
        ("duration", {0: "0 us", 2.5e-5: "25 us", 0.0123: "12.3 ms", 1234: "1,234 s"}),
        ("percent", {0: "0 %", 0.126: "13 %", 1: "100 %"}),
        (
            "bytes",
            {0: "0 bytes", 1000: "1000 bytes", 1536: "1.5 KiB", 48e6: "45.78 MiB"}
            | {1 << 42: "4,096.0 GiB"},
        ),
    ],
)
def test_numbers_as_text(tmp_path, function, texts):
    expression = f"{json.dumps([*texts])}.map(number => {function}(number))"
    assert evaluate(page(SAMPLE), expression, tmp_path) == [*texts.values()]


def test_ticks_are_round_and_reach_the_most(tmp_path):
    numbers = [0.0, 1e-9, 0.31, 1.0, 7.2, 999, 12345.6]
    expression = f"{json.dumps(numbers)}.map(most => ticks(most))"
    for most, ticks in zip(numbers, evaluate(page(SAMPLE), expression, tmp_path)):
        assert ticks[-1] >= most * 0.999
        assert 2 <= len(ticks) <= 8
        assert ticks[0] == 0
        step = ticks[1]
        assert float(f"{step:.1e}") == pytest.approx(step, rel=1e-12)
