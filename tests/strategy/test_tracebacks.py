"""The text of errors: one error once, and the user's frames with one line of ours."""

import traceback
from pathlib import Path

import numpy as np
import pytest

import mpidist

PACKAGE = str(Path(mpidist.__file__).parent)


def text_of(error):
    return "".join(traceback.format_exception(error))


def frames(error):
    """The functions that the traceback names: ours as "mpidist", others by name."""
    return [
        "mpidist" if frame.filename.startswith(PACKAGE) else frame.name
        for frame in traceback.extract_tb(error.__traceback__)
    ]


def raised_by(call):
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.reduce("SUM", np.ones(3), axis=5),
        lambda s: s.reduce("SUM", {"a": [True]}),
        lambda s: s.reduce("SUM", {"a": "text"}),
        lambda s: s.gather({"a": np.ones(3)}, axis=1),
        lambda s: s.gather(1.0, axis=0),
    ],
)
def test_one_error_is_shown_once(strategy, call):
    error = raised_by(lambda: call(strategy))
    text = text_of(error)
    assert isinstance(error, mpidist.MpidistError)
    assert text.count(str(error)) == 1
    assert text.count("Traceback (most recent call last)") == 1
    assert "During handling" not in text


def test_a_bad_axis_on_one_rank_is_shown_once_on_each(strategy):
    axis = 5 if strategy.extended.replica_id == 0 else 0
    error = raised_by(lambda: strategy.reduce("SUM", np.ones(3), axis=axis))
    text = text_of(error)
    is_copy = strategy.extended.replica_id > 0
    assert text.count("Traceback (most recent call last)") == 1 + is_copy
    assert "During handling" not in text


def fail(context=None):
    replica = mpidist.get_replica_context()
    if replica is None or replica.replica_id_in_sync_group == 0:
        raise KeyError("mine")
    return context


def helper():
    return fail()


def test_an_error_in_run_has_the_users_frames_and_one_of_ours(strategy):
    def step():
        helper()

    error = raised_by(lambda: strategy.run(step))
    assert type(error) is KeyError
    ends = {True: ["mpidist", "step", "helper", "fail"], False: ["mpidist"]}
    is_own = strategy.extended.replica_id == 0
    assert frames(error) == ["raised_by", "<lambda>", *ends[is_own]]
    if not is_own:
        # What the other rank tells is folded, too
        report = str(error.__cause__)
        assert report.count(PACKAGE) == 1
        assert "in helper" in report


def test_errors_in_merge_call_are_folded(strategy):
    def step():
        mpidist.get_replica_context().merge_call(lambda s: fail())

    error = raised_by(lambda: strategy.run(step))
    expected = ["mpidist", "step", "mpidist", "<lambda>", "fail"]
    assert frames(error) == ["raised_by", "<lambda>", *expected]


def test_errors_caught_in_the_replica_function_are_folded(strategy):
    def step():
        context = mpidist.get_replica_context()
        return frames(raised_by(lambda: context.merge_call(lambda s: fail())))

    (found,) = strategy.experimental_local_results(strategy.run(step))
    assert found == ["raised_by", "<lambda>", "mpidist", "<lambda>", "fail"]


def test_the_line_of_ours_is_the_call_that_the_user_made(strategy):
    def step():
        return mpidist.get_replica_context().all_reduce("SUM", "text")

    error = raised_by(lambda: strategy.run(step))
    assert type(error) is mpidist.ArgumentTypeError
    assert frames(error) == ["raised_by", "<lambda>", "mpidist", "step", "mpidist"]
    entries = traceback.extract_tb(error.__traceback__)
    assert [entry.name for entry in entries[2::2]] == ["run", "all_reduce"]


@pytest.mark.parametrize("name", ["experimental_run", "call_for_each_replica"])
def test_other_names_of_run_are_folded(strategy, name):
    owner = strategy if hasattr(strategy, name) else strategy.extended

    def step():
        raise KeyError("mine")

    error = raised_by(lambda: getattr(owner, name)(step))
    assert frames(error) == ["raised_by", "<lambda>", "mpidist", "step"]


def divide(x):
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize("calls", [None, 2])
@pytest.mark.parametrize("make", ["rows", "batches", "generator"])
def test_errors_in_map_are_folded(strategy, make, calls):
    rows = mpidist.Dataset.range(6)
    dataset = {
        "rows": rows.map(divide, calls).batch(2),
        "batches": rows.batch(2).map(divide, calls),
        "generator": mpidist.Dataset.from_generator(lambda: iter(range(6)))
        .map(divide, calls)
        .batch(2),
    }[make]
    distributed = strategy.experimental_distribute_dataset(dataset)
    iterator = iter(distributed)
    for call in (
        lambda: next(iterator),
        lambda: iter(distributed).get_next(),
        lambda: iter(distributed).get_next_as_optional(),
    ):
        error = raised_by(call)
        assert type(error) is ZeroDivisionError
        assert frames(error)[-2:] == ["mpidist", "divide"]
        assert frames(error).count("mpidist") == 1


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("calls", [None, 2])
def test_errors_in_map_of_a_local_dataset_are_folded(ahead, calls):
    for rows in (
        mpidist.Dataset.range(6),
        mpidist.Dataset.from_generator(lambda: iter(range(6))),
    ):
        dataset = rows.map(divide, calls).prefetch(ahead)
        error = raised_by(lambda dataset=dataset: next(iter(dataset)))
        assert frames(error) == ["raised_by", "<lambda>", "mpidist", "divide"]


def test_a_variable_shows_all_frames(strategy, monkeypatch):
    monkeypatch.setenv("MPIDIST_FULL_TRACEBACKS", "1")

    def step():
        raise KeyError("mine")

    error = raised_by(lambda: strategy.run(step))
    assert frames(error).count("mpidist") > 2
    assert frames(error)[-1] == "step"


def test_errors_that_come_up_here_by_mistake_keep_their_frames(strategy, monkeypatch):
    monkeypatch.setattr("mpidist.strategy.strategy.regroup", None)
    error = raised_by(lambda: strategy.run(lambda: 1))
    assert type(error) is TypeError
    assert frames(error).count("mpidist") > 2
