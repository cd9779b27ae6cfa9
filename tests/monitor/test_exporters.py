"""Scalars for TensorBoard and Prometheus, read back by other means than they were."""

from __future__ import annotations

import errno
import logging
import math
import struct
import sys

import numpy as np
import pytest

import mpidist
from mpidist.monitor import exporters
from mpidist.monitor.exporters import ScalarWriter

parser = pytest.importorskip("prometheus_client.parser")
event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")


def read_events(folder):
    """Return the scalars of the one file in a folder, as (step, name, value)."""
    (path,) = folder.iterdir()
    data, events = path.read_bytes(), []
    while data:
        (size,) = struct.unpack("<Q", data[:8])  # a record of TensorFlow
        events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    assert events[0].file_version == "brain.Event:2"
    return [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]


def read_gauges(path):
    families = parser.text_string_to_metric_families(path.read_text())
    return {
        (sample.name, sample.labels["name"], sample.labels["job"]): sample.value
        for family in families
        for sample in family.samples
    }


def test_rank_0_writes_what_others_read(comm, strategy, tmp_path):
    folder = comm.bcast(tmp_path)
    events, gauges = folder / "a" / "events", folder / "b" / "job.prom"
    with ScalarWriter(
        strategy, tensorboard=events, prometheus=str(gauges), job="of test"
    ) as scalars:
        scalars.write({"loss/train": np.float32(0.5), "loss.train": 2}, step=1)
        scalars.write({"loss/train": np.array([0.25])[0], "n": math.nan}, step=2)
    comm.Barrier()
    *first, (step, name, value) = read_events(events)
    assert first == [(1, "loss/train", 0.5), (1, "loss.train", 2), (2, *first[2][1:])]
    assert first[2][1:] == ("loss/train", 0.25)
    assert (step, name, math.isnan(value)) == (2, "n", True)
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


def test_files_stay_where_they_were_named(comm, strategy, tmp_path, monkeypatch):
    """Whatever folder the program changes to afterwards."""
    first, second = comm.bcast((tmp_path / "first", tmp_path / "second"))
    if comm.rank == 0:
        first.mkdir()
        second.mkdir()
    comm.Barrier()
    monkeypatch.chdir(first)
    manager = mpidist.CheckpointManager(
        mpidist.Checkpoint(strategy=strategy, step=1), "runs", 2
    )
    with (
        strategy.timeline("timeline"),
        ScalarWriter(strategy, prometheus="job.prom", tensorboard="events") as scalars,
        mpidist.Hdf5Writer(strategy, "rows.h5") as rows,
    ):
        comm.Barrier()
        monkeypatch.chdir(second)
        scalars.write({"loss": 0.5}, step=3)
        rows.append(np.ones(2))
        manager.save()
    comm.Barrier()
    assert not [*second.iterdir()]
    assert read_gauges(first / "job.prom")["mpidist_step", "step", ""] == 3
    assert len([*(first / "timeline").iterdir()]) == 2 * comm.size
    assert mpidist.latest_checkpoint(first / "runs")
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
        ({}, mpidist.ArgumentError, "needs tensorboard="),
        ({"prometheus": "x.txt"}, mpidist.ArgumentError, "must end in .prom"),
        ({"tensorboard": 3}, mpidist.ArgumentTypeError, "tensorboard must be a path"),
        ({"tensorboard": "x", "job": 3}, mpidist.ArgumentTypeError, "job"),
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


@pytest.mark.parametrize(
    ("package", "argument"),
    [
        ("tensorboardX.record_writer", {"tensorboard": "x"}),
        ("prometheus_client", {"prometheus": "x.prom"}),
    ],
)
def test_without_the_package_all_ranks_raise(
    comm, strategy, tmp_path, monkeypatch, package, argument
):
    monkeypatch.chdir(tmp_path)
    if comm.rank == 0:
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(mpidist.UnsupportedError, match=r"pip install (ten|prom)"):
        ScalarWriter(strategy, **argument)


def test_a_folder_that_cannot_be_made_is_an_error_on_all(comm, strategy, tmp_path):
    (tmp_path / "file").touch()
    for name, path in (("tensorboard", "file/x"), ("prometheus", "file/x.prom")):
        with pytest.raises(OSError):
            ScalarWriter(strategy, **{name: tmp_path / path})
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.parametrize("value", [None, "x", np.zeros(2), [1], 1j])
def test_no_numbers_are_refused(strategy, tmp_path, value):
    with (
        ScalarWriter(strategy, prometheus=tmp_path / "x.prom") as scalars,
        pytest.raises(mpidist.ArgumentTypeError, match="'a' must be a number"),
    ):
        scalars.write({"a": value}, step=1)


def test_names_that_are_none_are_refused(strategy, tmp_path):
    scalars = ScalarWriter(strategy, prometheus=tmp_path / "x.prom")
    with pytest.raises(mpidist.ArgumentTypeError, match="names must be text"):
        scalars.write({3: 1}, step=1)
    with pytest.raises(mpidist.ArgumentTypeError, match="step"):
        scalars.write({"a": 1}, step=1.5)


def test_a_disk_that_is_full_hurts_no_job(
    comm, strategy, tmp_path, caplog, monkeypatch
):
    events, gauges = tmp_path / "events", tmp_path / "x.prom"
    scalars = ScalarWriter(strategy, tensorboard=events, prometheus=gauges)
    scalars.write({"a": 1}, step=1)
    if comm.rank == 0:
        (path,) = events.iterdir()
        records = scalars._exporters[0]._records
        records._writer.close()
        records._writer = open("/dev/full", "wb")  # noqa: SIM115 - it closes it
        monkeypatch.setattr(exporters, "replace_file", refuse)
        monkeypatch.setattr(exporters, "_LEAST_SECONDS", 0.0)
    for step in (2, 3):
        scalars.write({"a": step}, step=step)
    scalars.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == (2 if comm.rank == 0 else 0)
    for text in texts:
        assert "no more scalars are written" in text
        assert "No space left" in text
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    if comm.rank == 0:
        assert read_events(path.parent) == [(1, "a", 1)]
        assert read_gauges(gauges) == {
            ("mpidist_a", "a", ""): 1,
            ("mpidist_step", "step", ""): 1,
        }
    assert strategy.reduce("SUM", 1) == comm.size


def refuse(path):
    raise OSError(errno.ENOSPC, "No space left on device")
