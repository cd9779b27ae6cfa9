"""The settings: one table, obeyed by all readers, and the page that is made from it."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.tools.cli import settings_page
from mpidist.util.settings import (
    BANNER,
    CUDA_AWARE,
    HANG_SECONDS,
    LOG,
    RANKS_PER_NODE,
    SETTINGS,
    LogChoice,
    require_settings,
    resolve,
    unknown_names,
)

PACKAGE = Path(mpidist.__file__).parent
ROOT = PACKAGE.parent


def test_the_page_of_the_manual_is_current():
    """`python -m mpidist config --markdown > docs/settings.md` makes it."""
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page()


def test_names_are_sorted_and_unlike():
    names = [setting.name for setting in SETTINGS]
    assert names == sorted(set(names))
    for setting in SETTINGS:
        assert re.fullmatch(r"MPIDIST_[A-Z]+(_[A-Z]+)*", setting.name)
        assert setting.meaning.endswith(".")
        assert setting.allowed
        assert setting.default_text


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_each_is_read_where_the_table_says(setting):
    path = PACKAGE.joinpath(*setting.read_by.split(".")[1:]).with_suffix(".py")
    constant = setting.name.removeprefix("MPIDIST_")
    if path.exists():  # the timeline is made elsewhere
        assert re.search(rf"\b({constant}|{constant.lower()})\b", path.read_text())


def test_nothing_else_reads_them():
    names = "|".join(setting.name for setting in SETTINGS)
    pattern = rf"(environ|getenv)[^\n]*[\"']({names})"
    for path in PACKAGE.rglob("*.py"):
        assert not re.search(pattern, path.read_text()), path


def test_nothing_names_a_setting_that_is_none():
    known = {setting.name for setting in SETTINGS}
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
    files += [ROOT / "README.md", *(ROOT / "jobs").iterdir()]
    for path in files:
        if path.is_file():
            found = set(re.findall(r"\bMPIDIST_[A-Z_]*[A-Z]\b", path.read_text()))
            assert found <= known, path


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("MPIDIST_BANER", "MPIDIST_BANNER"),
        ("MPIDIST_HANG_SECOND", "MPIDIST_HANG_SECONDS"),
        ("MPIDIST_HNG", "MPIDIST_HANG_SECONDS"),
        ("MPIDIST_TIMELINES", "MPIDIST_TIMELINE"),
        ("MPIDIST_log", "MPIDIST_LOG"),
    ],
)
def test_the_nearest_name_is_said(name, nearest):
    assert f"did you mean {nearest}?" in unknown_names({name: "1"})[name]
    with pytest.raises(
        mpidist.LaunchError, match=f"^{name} is not a setting of mpidist"
    ):
        require_settings({name: "1"})
    require_settings({name: ""})
    require_settings({name.removeprefix("MPI"): "1"})


@settings(derandomize=True, deadline=None)
@given(st.text())
def test_any_name_has_a_nearest_one(text):
    assert (
        "did you mean MPIDIST_" in unknown_names({f"MPIDIST_?{text}": "1"}).popitem()[1]
    )


@pytest.mark.parametrize("who", ["first", "last", "all"])
def test_an_unknown_variable_is_an_error_on_all(comm, monkeypatch, who):
    ranks = {"first": [0], "last": [comm.size - 1], "all": range(comm.size)}[who]
    if comm.rank in ranks:
        monkeypatch.setenv("MPIDIST_BANER", "0")
    with pytest.raises(mpidist.LaunchError, match="did you mean MPIDIST_BANNER"):
        mpidist.MirroredStrategy(["CPU:0"], communicator=comm)
    monkeypatch.delenv("MPIDIST_BANER", raising=False)
    strategy = mpidist.MirroredStrategy(["CPU:0"], communicator=comm)
    assert strategy.reduce("SUM", np.ones(1)) == comm.size
    strategy.experimental_finalize()


@pytest.mark.parametrize(
    ("name", "text"), [("MPIDIST_LOG", "loud"), ("MPIDIST_HANG_SECONDS", "-1")]
)
def test_a_value_that_cannot_be_read_is_an_error_on_all(comm, monkeypatch, name, text):
    if comm.rank == comm.size - 1:
        monkeypatch.setenv(name, text)
    with pytest.raises(mpidist.LaunchError, match=f"{name} must be .*, not '{text}'"):
        mpidist.MirroredStrategy(["CPU:0"], communicator=comm)


def test_arguments_count_more_than_the_environment_and_that_more_than_a_file():
    environ = {"MPIDIST_CUDA_AWARE": "0"}
    assert resolve(CUDA_AWARE, True, environ, True) == (True, "argument")
    assert resolve(CUDA_AWARE, None, environ, True) == (False, "environment")
    assert resolve(CUDA_AWARE, None, {}, True) == (True, "tuning file")
    assert resolve(CUDA_AWARE, None, {"MPIDIST_CUDA_AWARE": ""}) == (None, "default")
    with pytest.raises(mpidist.LaunchError):
        resolve(CUDA_AWARE, True, {"MPIDIST_CUDA_AWARE": "yes"})


def test_what_comes_too_early_to_raise_takes_the_default():
    assert BANNER.read_or_default({"MPIDIST_BANNER": "yes"}) is True
    assert HANG_SECONDS.read_or_default({"MPIDIST_HANG_SECONDS": "5"}) == 5
    assert RANKS_PER_NODE.read_or_default({"MPIDIST_RANKS_PER_NODE": "9" * 11}) is None


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("debug", LogChoice("DEBUG", False)),
        ("json", LogChoice("", True)),
        ("Debug, JSON", LogChoice("DEBUG", True)),
        ("json,error", LogChoice("ERROR", True)),
    ],
)
def test_words_of_the_log(text, choice):
    assert LOG.read({"MPIDIST_LOG": text}) == choice


@pytest.mark.parametrize("text", ["loud", "debug,info", "json,json", ",", "debug json"])
def test_other_words_of_the_log_are_refused(text):
    with pytest.raises(mpidist.LaunchError, match="MPIDIST_LOG must be debug, info"):
        LOG.read({"MPIDIST_LOG": text})


def test_the_environment_is_that_of_now(monkeypatch):
    monkeypatch.setenv("MPIDIST_BANNER", "0")
    assert BANNER.read() is False
    assert os.environ["MPIDIST_BANNER"] == "0"
