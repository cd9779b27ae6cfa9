"""The main job, and the README's scripts."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import launching
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
LAST_LINE = re.compile(
    r"loss=\d\.\d{6} accuracy=(\d\.\d{4}) samples_per_s=\d+ ranks=(\d+)"
)


@pytest.fixture(scope="module")
def job():
    return launching.load_job("train_digits")


@pytest.mark.slow
def test_the_job_learns_the_digits(job, comm, mpi_tmp_path, capsys):
    data, picture = mpi_tmp_path / "deep" / "data", mpi_tmp_path / "curves.png"
    job.main([f"--data-dir={data}", f"--plot={picture}", "--epochs=25"])
    out = capsys.readouterr().out
    if comm.rank == 0:
        match = LAST_LINE.fullmatch(out.splitlines()[-1])
        assert float(match[1]) >= 0.97
        assert int(match[2]) == comm.size
        assert picture.read_bytes().startswith(b"\x89PNG")
        files = sorted(path.name for path in data.iterdir())
        assert files == [
            "digits-test.h5",
            *(f"digits-train-{i}-of-4.h5" for i in range(4)),
        ]
    else:
        assert out == ""


def test_the_files_hold_every_image_once(job, comm, strategy, mpi_tmp_path):
    from sklearn.datasets import load_digits

    train, test = job.prepare_data(strategy, mpi_tmp_path)
    rows = []
    for path in (*train, *test):
        with h5py.File(path, "r", locking=False) as file:
            rows += [(*x, y) for x, y in zip(file["x"][:], file["y"][:], strict=True)]
    images, labels = load_digits(return_X_y=True)
    expected = np.column_stack([images, labels]).astype(np.uint8)
    assert sorted(map(tuple, expected.tolist())) == sorted(
        map(tuple, np.array(rows).tolist())
    )
    sizes = [p.stat().st_size for p in train]
    assert len(set(sizes)) > 1 or len(images) % len(train) == 0


def test_files_that_exist_are_not_written_again(job, comm, strategy, mpi_tmp_path):
    job.prepare_data(strategy, mpi_tmp_path)
    before = {path: path.stat().st_mtime_ns for path in mpi_tmp_path.iterdir()}
    comm.Barrier()
    job.prepare_data(strategy, mpi_tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in mpi_tmp_path.iterdir()}


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(
    job, comm, strategy, mpi_tmp_path
):
    if comm.rank == 0:
        (mpi_tmp_path / "file").touch()
    comm.Barrier()
    with pytest.raises(OSError, match="file"):
        job.prepare_data(strategy, mpi_tmp_path / "file" / "data")
    assert [path.name for path in mpi_tmp_path.iterdir()] == ["file"]


def test_the_readmes_scripts_run(comm, capsys, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    text = (ROOT / "README.md").read_text()
    scripts = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    names = {}
    for script in scripts:  # the later ones go on where the first ended
        exec(compile(script, "README.md", "exec"), names)
    assert len(names["rest"]) == 2  # of the three steps of an epoch
    with h5py.File("errors.h5") as file:
        written = sorted(map(tuple, file["x"][:]))
        assert file["error"].shape == (10,)
    assert written == sorted(map(tuple, names["x"]))
    out = capsys.readouterr().out
    if comm.rank == 0:
        assert re.fullmatch(r"loss=\d\.\d{6}\n", out)
        # The last batch has 2 rows, whose squared errors end well below the first ones
        assert float(out.split("=")[1]) < 1.0
