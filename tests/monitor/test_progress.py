"""Progress: what is iterated over stays the same, and what is shown is right."""

import io
import re
import sys

import numpy as np
import pytest

import mpidist
from mpidist.monitor import progress as module


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def often(monkeypatch):
    """Each item is shown."""
    monkeypatch.setattr(module, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_BAR_SECONDS", 0.0)


def batches(strategy, steps=4):
    rows = mpidist.Dataset.range(6 * steps).batch(6)
    return strategy.experimental_distribute_dataset(rows)


def test_a_line_where_stderr_is_no_terminal(comm, strategy, often, capsys):
    data = batches(strategy)
    shown = mpidist.progress(data, unit="batch")
    assert len(shown) == 4
    for _ in range(2):  # two epochs
        sums = [strategy.reduce("SUM", batch, axis=0) for batch in shown]
        assert sums == [15, 51, 87, 123]
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if "batch " in line]
    if comm.rank:
        assert not lines
        return
    assert len(lines) == 10
    assert re.match(r"mpidist: batch 2 of 4, .*/s, [\d,]+ rows/s", lines[1])
    assert ("% waiting" in lines[1]) == (comm.size > 1)
    assert lines[1].endswith(" left")
    assert "took 0:00:0" in lines[4]


def test_a_minute_has_not_passed(comm, strategy, capsys):
    list(mpidist.progress(batches(strategy)))
    assert "rows/s" not in capsys.readouterr().err


def test_lines_in_a_terminal_without_tqdm(comm, strategy, often, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    module._say_no_tqdm.cache_clear()
    for _ in range(2):
        list(mpidist.progress(batches(strategy)))
    text = terminal.getvalue()
    assert text.count("pip install tqdm") == (comm.rank == 0)
    assert ("mpidist: step 4 of 4" in text) == (comm.rank == 0)


def test_a_bar_in_a_terminal(comm, strategy, often, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    list(mpidist.progress(batches(strategy)))
    text = terminal.getvalue()
    assert ("4/4" in text) == (comm.rank == 0)
    assert ("rows/s" in text) == (comm.rank == 0)


def test_other_things_to_iterate_over(comm, often, capsys):
    assert list(mpidist.progress(range(3), unit="epoch")) == [0, 1, 2]
    assert list(mpidist.progress(iter("ab"))) == ["a", "b"]
    [array] = mpidist.progress(iter([np.ones((5, 2))]), total=1)
    assert array.shape == (5, 2)
    assert list(mpidist.progress([])) == []
    with pytest.raises(TypeError):
        len(mpidist.progress(iter("ab")))
    err = capsys.readouterr().err
    assert ("epoch 3 of 3" in err) == (comm.rank == 0)
    assert ("step 2," in err) == (comm.rank == 0)


def test_a_loop_that_is_left_early(comm, often, capsys):
    for item in mpidist.progress(range(9)):
        if item == 2:
            break
    assert ("step 2 of 9" in capsys.readouterr().err) == (comm.rank == 0)


class Broken(io.StringIO):
    def write(self, text):
        raise OSError(28, "No space left on device")


def test_a_stderr_that_cannot_be_written_hurts_nobody(comm, often, monkeypatch):
    monkeypatch.setattr("sys.stderr", Broken())
    assert list(mpidist.progress(range(3))) == [0, 1, 2]
    monkeypatch.setattr("sys.stderr", None)
    assert list(mpidist.progress(range(3))) == [0, 1, 2]


def test_errors_pass(comm, often):
    def fail():
        yield 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(mpidist.progress(fail()))


@pytest.mark.parametrize(
    "arguments", [{"total": -1}, {"total": "3"}, {"total": 2.5}, {"unit": 3}], ids=str
)
def test_wrong_arguments_of_one_rank_are_an_error_on_all(comm, strategy, arguments):
    rows = mpidist.Dataset.range(8).batch(4)
    data = strategy.experimental_distribute_dataset(rows)
    own = arguments if comm.rank == comm.size - 1 else {}
    with pytest.raises((mpidist.ArgumentError, mpidist.ArgumentTypeError)):
        list(mpidist.progress(data, **own))
    assert strategy.reduce("SUM", 1) == comm.size
    with pytest.raises(mpidist.ArgumentTypeError, match="needs an iterable"):
        mpidist.progress(3)


def test_a_length_that_raises_hurts_nobody():
    class Endless(list):
        def __len__(self):
            raise ValueError("no length")

    assert [x for x in mpidist.progress(Endless([1, 2]))] == [1, 2]  # noqa: C416
