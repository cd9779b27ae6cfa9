"""Scalars for Prometheus, read back by its own parser."""

import errno
import logging
import math
import sys

import numpy as np
import pytest

import mpidist
from mpidist.monitor import exporters
from mpidist.monitor.exporters import ScalarWriter

parser = pytest.importorskip("prometheus_client.parser")


def read_gauges(path):
    families = parser.text_string_to_metric_families(path.read_text())
    return {
        (sample.name, sample.labels["name"], sample.labels["job"]): sample.value
        for family in families
        for sample in family.samples
    }


def test_rank_0_writes_what_others_read(comm, strategy, tmp_path):
    folder = comm.bcast(tmp_path)
    gauges = folder / "b" / "job.prom"
    with ScalarWriter(strategy, prometheus=str(gauges), job="of test") as scalars:
        scalars.write({"loss/train": np.float32(0.5), "loss.train": 2}, step=1)
        scalars.write({"loss/train": np.array([0.25])[0], "n": math.nan}, step=2)
    comm.Barrier()
    found = read_gauges(gauges)
    assert math.isnan(found.pop(("mpidist_n", "n", "of test")))
    assert found == {
        ("mpidist_loss_train", "loss/train", "of test"): 0.25,
        ("mpidist_loss_train", "loss.train", "of test"): 2,
        ("mpidist_step", "step", "of test"): 2,
    }
    assert [path.name for path in gauges.parent.iterdir()] == ["job.prom"]


def test_a_scalar_named_like_the_step(comm, strategy, tmp_path):
    path = comm.bcast(tmp_path) / "job.prom"
    with ScalarWriter(strategy, prometheus=path) as scalars:
        scalars.write({"step": 0.5, "scalar/step": 1}, step=7)
    comm.Barrier()
    assert read_gauges(path) == {
        ("mpidist_step", "step", ""): 7,
        ("mpidist_scalar_step", "step", ""): 0.5,
        ("mpidist_scalar_step", "scalar/step", ""): 1,
    }


def test_arrays_of_one_element_are_numbers(strategy, tmp_path):
    values = [np.ones(1), np.ones((1, 1), np.float32), np.array(1), np.bool_(True), 1]
    with ScalarWriter(strategy, prometheus=tmp_path / "x.prom") as scalars:
        scalars.write({f"n{i}": value for i, value in enumerate(values)}, step=1)
        for wrong in ("1", b"1", np.ones(2), np.ones(0), 1j, [1.0], 10**400):
            with pytest.raises(mpidist.ArgumentTypeError, match="'n' must be a num"):
                scalars.write({"n": wrong}, step=1)
        with pytest.raises(mpidist.ArgumentError, match="name of a scalar"):
            scalars.write({"\ud800": 1}, step=1)


def test_the_file_stays_where_it_was_named(comm, strategy, tmp_path, monkeypatch):
    """Whatever folder the program changes to afterwards."""
    first, second = comm.bcast((tmp_path / "first", tmp_path / "second"))
    first.mkdir(exist_ok=True)
    second.mkdir(exist_ok=True)
    monkeypatch.chdir(first)
    with ScalarWriter(strategy, prometheus="job.prom") as scalars:
        monkeypatch.chdir(second)
        scalars.write({"loss": 0.5}, step=3)
    comm.Barrier()
    assert not [*second.iterdir()]
    assert read_gauges(first / "job.prom")["mpidist_step", "step", ""] == 3
    comm.Barrier()


def test_only_rank_0_has_files(comm, strategy, tmp_path):
    """Though all call it, with paths of their own here."""
    with ScalarWriter(strategy, prometheus=tmp_path / "x.prom") as scalars:
        scalars.write({"a": 1}, step=1)
    assert (tmp_path / "x.prom").exists() == (comm.rank == 0)
    scalars.close()
    scalars.write({"a": 1}, step=2)
    assert "nothing" in repr(scalars)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"prometheus": "x.txt"}, mpidist.ArgumentError, "must end in .prom"),
        ({"prometheus": 3}, mpidist.ArgumentTypeError, "prometheus must be a path"),
        ({"prometheus": "x.prom", "job": 3}, mpidist.ArgumentTypeError, "job"),
    ],
)
def test_bad_arguments_are_errors_on_all(
    comm, strategy, tmp_path, monkeypatch, arguments, kind, text
):
    """Also where one rank alone passes them; and nothing is written."""
    monkeypatch.chdir(tmp_path)
    own = arguments if comm.rank == comm.size - 1 else {"prometheus": "x.prom"}
    with pytest.raises(kind, match=text):
        ScalarWriter(strategy, **own)
    assert strategy.reduce("SUM", 1) == comm.size
    assert list(tmp_path.iterdir()) == []


def test_without_the_package_all_ranks_raise(comm, strategy, tmp_path, monkeypatch):
    if comm.rank == 0:
        monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(mpidist.UnsupportedError, match=r"pip install prom"):
        ScalarWriter(strategy, prometheus=tmp_path / "x.prom")


def test_a_folder_that_cannot_be_made_is_an_error_on_all(comm, strategy, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        ScalarWriter(strategy, prometheus=tmp_path / "file" / "x.prom")
    assert strategy.reduce("SUM", 1) == comm.size


def test_names_that_are_none_are_refused(strategy, tmp_path):
    scalars = ScalarWriter(strategy, prometheus=tmp_path / "x.prom")
    with pytest.raises(mpidist.ArgumentTypeError, match="names must be text"):
        scalars.write({3: 1}, step=1)
    with pytest.raises(mpidist.ArgumentTypeError, match="step"):
        scalars.write({"a": 1}, step=1.5)


def test_a_disk_that_is_full_hurts_no_job(
    comm, strategy, tmp_path, caplog, monkeypatch
):
    gauges = tmp_path / "x.prom"
    scalars = ScalarWriter(strategy, prometheus=gauges)
    scalars.write({"a": 1}, step=1)
    monkeypatch.setattr(exporters, "replace_file", refuse)
    monkeypatch.setattr(exporters, "_LEAST_SECONDS", 0.0)
    for step in (2, 3):
        scalars.write({"a": step}, step=step)
    scalars.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (comm.rank == 0)
    for text in texts:
        assert "no more scalars are written" in text
        assert "No space left" in text
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    if comm.rank == 0:
        assert read_gauges(gauges) == {
            ("mpidist_a", "a", ""): 1,
            ("mpidist_step", "step", ""): 1,
        }
    assert strategy.reduce("SUM", 1) == comm.size


def refuse(path):
    raise OSError(errno.ENOSPC, "No space left on device")
