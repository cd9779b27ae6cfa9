"""Logging: who writes what where, and that nothing of it ever hurts a job."""

from __future__ import annotations

import functools
import io
import json
import logging
import re
import socket
import sys
from unittest import mock

import pytest

from mpidist.util import logs

HOST = re.escape(socket.gethostname())
JOB = """
import logging, os, sys
import mpidist
from mpidist.util import logs

strategy = mpidist.MirroredStrategy(["CPU:0"])
rank = strategy.extended.replica_id
"""
SAY = """
logs.debug("data", f"debug of {rank}")
logs.info("data", f"info of {rank}")
logs.warning("data", f"warning of {rank}, 100 %s")
sys.stderr.flush()
assert strategy.reduce("SUM", 1) == 2
sys.stdout.write("well\\n")
"""


OURS, ROOT = logging.getLogger("mpidist"), logging.getLogger()


def alone(test):
    """Have a test begin as `import mpidist` does: pytest's own handlers are away."""

    @functools.wraps(test)
    def wrapped(*arguments, **named):
        before = [(logger, logger.handlers, logger.level) for logger in (OURS, ROOT)]
        OURS.handlers, ROOT.handlers = [], []
        OURS.setLevel(logging.NOTSET)
        ROOT.setLevel(logging.WARNING)
        try:
            with mock.patch.object(sys, "stderr", io.StringIO()):
                test(*arguments, **named)
        finally:
            for logger, handlers, level in before:
                logger.handlers = handlers
                logger.setLevel(level)

    return wrapped


class Kept(logging.Handler):
    """Keeps records."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


class Broken(logging.Handler):
    """Raises, as a handler must not."""

    def emit(self, record):
        raise OSError("no space left")


def said():
    return sys.stderr.getvalue()


@pytest.mark.parametrize(
    ("rank", "levels"), [(0, ["INFO", "WARNING"]), (3, ["WARNING"])]
)
@alone
def test_info_of_rank_0_and_warnings_of_all(rank, levels):
    logs.start(rank)
    logs.debug("data", "a")
    logs.info("data", "b")
    logs.warning("data", "100 %s")
    texts = {"INFO": "b", "WARNING": "100 %s"}
    host = socket.gethostname()
    lines = [f"[{level} rank {rank} {host}] {texts[level]}" for level in levels]
    assert said().splitlines() == lines


@pytest.mark.parametrize(
    ("text", "count"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)]
)
@alone
def test_a_level_is_that_of_all_ranks(monkeypatch, text, count):
    monkeypatch.setenv("MPIDIST_LOG", text)
    logs.start(3)
    logs.debug("data", "a")
    logs.info("data", "b")
    logs.warning("data", "c")
    assert len(said().splitlines()) == count


@alone
def test_what_cannot_be_read_is_the_default(monkeypatch):
    monkeypatch.setenv("MPIDIST_LOG", "loud")
    logs.start(0)
    logs.info("data", "b")
    assert said().endswith("] b\n")


@alone
def test_lines_of_json(monkeypatch):
    monkeypatch.setenv("MPIDIST_LOG", "debug,json")
    logs.start(2)
    logs.debug("data", "two\nlines")
    logs.warning("data", "a warning of Python", is_shown=True)
    logs.report("data", "the end")
    found = [json.loads(line) for line in said().splitlines()]
    assert [record.pop("level") for record in found] == ["DEBUG", "WARNING", "ERROR"]
    assert [record.pop("message") for record in found] == [
        *("two\nlines", "a warning of Python", "the end"),
    ]
    for record in found:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", record.pop("time"))
        host = socket.gethostname()
        assert record == {"rank": 2, "host": host, "logger": "mpidist.data"}


@alone
def test_an_application_that_configures_logging_has_it_alone():
    logs.start(0)
    kept = Kept()
    ROOT.addHandler(kept)
    logs.info("data", "b")  # below the application's level
    logs.warning("comm", "c")
    ROOT.setLevel(logging.DEBUG)
    logs.debug("comm", "d")
    assert said() == ""
    assert [record.getMessage() for record in kept.records] == ["c", "d"]
    assert [record.rank for record in kept.records] == [0, 0]
    assert kept.records[0].host == socket.gethostname()
    assert kept.records[0].name == "mpidist.comm"
    assert kept.records[0].funcName == "test_an_application_that_configures_logging" + (
        "_has_it_alone"
    )


@pytest.mark.parametrize("is_before", [False, True])
@alone
def test_the_level_of_the_application_stays_if_it_is_ours(is_before):
    """INFO on rank 0, too."""
    if is_before:
        OURS.setLevel(logging.INFO)
    logs.start(0)
    OURS.setLevel(logging.INFO)
    ROOT.addHandler(kept := Kept())
    logs.info("comm", "progress")
    assert [record.getMessage() for record in kept.records] == ["progress"]
    assert OURS.level == logging.INFO


@alone
def test_a_level_that_the_application_has_set_stays():
    OURS.setLevel(logging.ERROR)
    logs.start(0)
    kept = Kept()
    ROOT.addHandler(kept)
    logs.warning("data", "c")
    assert OURS.level == logging.ERROR
    assert kept.records == []


@alone
def test_who_asks_for_it_has_both(monkeypatch):
    monkeypatch.setenv("MPIDIST_LOG", "info")
    logs.start(0)
    kept = Kept()
    ROOT.addHandler(kept)
    logs.info("data", "b")
    assert said().endswith("] b\n")
    assert len(kept.records) == 1


@alone
def test_why_a_job_ends_is_said_in_any_case_and_once():
    logs.start(1)
    logs.report("resilience", "the end")
    assert re.fullmatch(rf"\[ERROR rank 1 {HOST}\] the end\n", said())
    kept = Kept()
    ROOT.addHandler(kept)
    logs.report("resilience", "another end")
    assert len(said().splitlines()) == 2
    assert [record.getMessage() for record in kept.records] == ["another end"]


@alone
def test_python_shows_its_warnings_itself():
    logs.start(0)
    logs.warning("data", "c", is_shown=True)
    assert said() == ""


class Stream(io.StringIO):
    """A stderr that logs what is written to it, and fails if it is told to."""

    error: BaseException | None = None

    def write(self, text):
        logs.warning("data", f"written: {text}")
        logging.getLogger("mpidist.data").error("written")
        if self.error is not None:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize(
    "error", [None, OSError(28, "no space left"), ValueError("closed"), MemoryError()]
)
@alone
def test_a_stream_that_fails_or_logs_itself(monkeypatch, error):
    logs.start(0)
    stream = Stream()
    stream.error = error
    monkeypatch.setattr(sys, "stderr", stream)
    logs.warning("data", "a text")
    logs.warning("data", "another")
    logging.getLogger("mpidist.data").warning("%d", "no number")  # never raises
    stream.error = None
    logs.warning("data", "well")
    assert stream.getvalue().endswith("] well\n")


@alone
def test_handlers_and_filters_of_the_application_that_raise():
    logs.start(0)
    ROOT.addHandler(Broken())
    logs.warning("data", "a text")
    logs.report("data", "the end")
    assert said().endswith("] the end\n")

    def refuse(record):
        raise KeyError

    OURS.handlers[0].addFilter(refuse)
    logs.warning("data", "a text")


@alone
def test_starting_again_leaves_one_handler():
    logs.start(0)
    logs.start(1)
    logs.warning("data", "c")
    assert len(said().splitlines()) == len(OURS.handlers) == 1


@pytest.mark.mpirun
@pytest.mark.parametrize(
    ("choice", "of_0", "of_1"),
    [
        ("", "IW", "W"),
        ("debug", "DIW", "DIW"),
        pytest.param(*("error,json", "", ""), marks=pytest.mark.slow),
    ],
)
def test_records_of_a_job(mpirun, choice, of_0, of_1):
    ended = mpirun(2, JOB + SAY, MPIDIST_LOG=choice, MPIDIST_BANNER="0")
    found = re.findall(rf"\[([DIW])\w+ rank (\d) {HOST}\] \w+ of (\d)", ended.stderr)
    assert all(rank == of for _, rank, of in found)
    for rank, levels in (("0", of_0), ("1", of_1)):
        assert "".join(level for level, of, _ in found if of == rank) == levels


@pytest.mark.mpirun
def test_banner_and_end_are_lines_of_json(mpirun):
    script = JOB + "if rank == 1: raise KeyError('reason')\nstrategy.reduce('SUM', 1)\n"
    ended = mpirun(2, script, MPIDIST_LOG="json", fails=True)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("{")]
    banner, *_, end = map(json.loads, lines)
    assert banner["message"].startswith("mpidist 0.")
    assert (banner["level"], banner["rank"]) == ("INFO", 0)
    assert (end["level"], end["rank"]) == ("ERROR", 1)
    assert end["message"].endswith("KeyError: 'reason'")


@pytest.mark.mpirun
def test_a_handler_that_raises_on_one_rank_keeps_no_ranks_apart(mpirun):
    script = """
import logging
class Broken(logging.Handler):
    def emit(self, record):
        raise OSError("no space left")
import os
if os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK")) == "1":
    logging.getLogger().addHandler(Broken())
"""
    ended = mpirun(2, script + JOB + SAY)
    assert ended.stdout.split() == ["well", "well"]
