"""The digits jobs, and the README's scripts."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import h5py
import launching
import numpy as np
import pytest
from all_ranks import on_root

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "jobs"
LAST_LINE = re.compile(
    r"loss=\d\.\d{6} accuracy=(\d\.\d{4}) samples_per_s=\d+ ranks=(\d+)"
    r"( speedup=\d+\.\d\d)?"
)
# Steps that cost little
SMALL = ["--shifts=0", "--hidden=128", "--batch-size=64", "--learning-rate=0.05"]


@pytest.fixture(scope="module")
def job():
    return launching.load_job("train_digits")


@pytest.fixture(scope="module")
def digits():
    return launching.load_job("digits")


def read_rows(paths):
    """Return all rows of files, each as a tuple of pixels and the label."""
    rows = []
    for path in paths:
        with h5py.File(path, "r", locking=False) as file:
            rows += [(*x, y) for x, y in zip(file["x"][:], file["y"][:], strict=True)]
    return [tuple(map(int, row)) for row in rows]


def times_of(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.slow
def test_the_job_learns_the_digits(job, comm, mpi_tmp_path, capsys):
    data, picture = mpi_tmp_path / "deep" / "data", mpi_tmp_path / "curves.png"
    job.main([f"--data-dir={data}", f"--plot={picture}", "--epochs=15"])
    out = capsys.readouterr().out
    if comm.rank == 0:
        match = LAST_LINE.fullmatch(out.splitlines()[-1])
        assert float(match[1]) >= 0.97
        assert int(match[2]) == comm.size
        assert picture.read_bytes().startswith(b"\x89PNG")
        files = sorted(path.name for path in data.iterdir())
        assert files == [
            "digits-test.h5",
            *(f"digits-train-4-shifts-{i}-of-4.h5" for i in range(4)),
        ]
    else:
        assert out == ""


@pytest.mark.slow
def test_any_number_of_ranks_prints_the_same_digits(mpirun, tmp_path):
    ranks = (1, 2, 3, 4)
    script = str(JOBS / "train_digits.py")
    more = [f"--data-dir={tmp_path}", "--epochs=3"]
    lines = [mpirun(n, script, *more).stdout.split() for n in ranks]
    assert [line[3] for line in lines] == [f"ranks={n}" for n in ranks]
    assert lines[0][0].startswith("loss=")
    assert {tuple(line[:2]) for line in lines} == {tuple(lines[0][:2])}


@pytest.mark.slow
def test_a_resumed_job_prints_the_digits_of_one_that_ran_on(mpirun, tmp_path):
    more = [f"--data-dir={tmp_path}", *SMALL]
    expected = mpirun(1, str(JOBS / "train_digits.py"), *more, "--epochs=3").stdout
    resumable = str(JOBS / "train_digits_resumable.py")
    more += [f"--checkpoint-dir={tmp_path / 'run'}", "--save-every=10"]
    mpirun(2, resumable, *more, "--epochs=1")
    ended = mpirun(3, resumable, *more, "--epochs=3")
    assert ended.stdout.split()[:2] == expected.split()[:2]
    again = mpirun(1, resumable, *more, "--epochs=3")
    assert again.stdout.split()[:3] == [*expected.split()[:2], "samples_per_s=0"]


def test_a_resumed_job_keeps_the_results_of_each_epoch(job, comm, mpi_tmp_path):
    """As the picture shows them."""
    resumable = launching.load_job("train_digits_resumable")
    reported = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "digits.report", lambda epochs, *rest: reported.append(list(epochs))
        )
        more = [f"--data-dir={mpi_tmp_path}", *SMALL, "--devices", "CPU:0"]
        job.main([*more, "--epochs=2"])
        more += ["--checkpoint-dir", str(mpi_tmp_path / "run")]
        resumable.main([*more, "--epochs=1"])
        resumable.main([*more, "--epochs=2"])
    if comm.rank == 0:
        expected, first, both = np.array(reported[0]), reported[1], reported[2]
        assert first == both[:1]
        np.testing.assert_allclose(both, expected, rtol=1e-9)
    else:
        assert reported == []


def test_the_files_hold_every_image_once(digits, tmp_path):
    from sklearn.datasets import load_digits

    digits.write_missing(tmp_path, shifts=0)
    train, test = digits.paths(tmp_path, 0)
    images, labels = load_digits(return_X_y=True)
    expected = np.column_stack([images, labels]).astype(int)
    found = read_rows([*train, test])
    assert sorted(found) == sorted(map(tuple, expected.tolist()))
    sizes = [len(read_rows([path])) for path in train]
    assert sizes == [359, 359, 359, 360]


@pytest.mark.parametrize("shifts", [1, 4])
def test_training_images_are_shifted_too(digits, tmp_path, shifts):
    digits.write_missing(tmp_path, 0)
    digits.write_missing(tmp_path, shifts)
    train, test = digits.paths(tmp_path, shifts)
    plain, same_test = digits.paths(tmp_path, 0)
    assert same_test == test
    rows, few = read_rows(train), read_rows(plain)
    assert len(rows) == len(few) * (1 + shifts)
    expected = list(few)
    for axis, step in [(2, 1), (2, -1), (1, 1), (1, -1)][:shifts]:
        images = np.array(few)[:, :64].reshape(-1, 8, 8)
        moved = np.roll(images, step, axis)
        edge = [slice(None)] * 3
        edge[axis] = 0 if step == 1 else -1
        moved[tuple(edge)] = 0  # what was at the other side
        expected += [
            (*x, row[64])
            for x, row in zip(moved.reshape(-1, 64).tolist(), few, strict=True)
        ]
    assert rows == expected


def test_files_that_exist_are_not_written_again(job, comm, strategy, mpi_tmp_path):
    options = options_of(job, mpi_tmp_path)
    job.read(strategy, options)
    before = times_of(mpi_tmp_path)
    comm.Barrier()
    job.read(strategy, options)
    assert before == times_of(mpi_tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error_on_all_ranks(
    job, comm, strategy, mpi_tmp_path
):
    on_root(comm, (mpi_tmp_path / "file").touch)
    with pytest.raises(OSError, match="file"):
        job.read(strategy, options_of(job, mpi_tmp_path / "file" / "data"))
    assert [path.name for path in mpi_tmp_path.iterdir()] == ["file"]


def options_of(job, folder):
    return job.digits.make_parser("").parse_args([f"--data-dir={folder}"])


@pytest.mark.parametrize("name", ["train_digits", "train_digits_resumable"])
def test_a_rank_computes_on_one_core(monkeypatch, name):
    """That is set before NumPy loads its BLAS, whatever imports that first."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    code = f"import sys; sys.path.insert(0, {str(JOBS)!r}); import {name}; "
    code += "import threadpoolctl; print(threadpoolctl.threadpool_info())"
    ended = launching.run([sys.executable, "-c", code])
    assert ended.returncode == 0, ended.stderr
    threads = {library["num_threads"] for library in ast.literal_eval(ended.stdout)}
    assert threads == {1}


def k_means():
    """What the README's first script finds, by NumPy alone."""
    points = np.random.default_rng(0).normal(size=(1000, 2))
    centers = np.array([[-1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    for _ in range(20):
        near = np.linalg.norm(points[:, None] - centers, axis=2).argmin(axis=1)
        centers = np.stack([points[near == k].mean(axis=0) for k in range(3)])
    return centers


def test_the_readmes_scripts_run(comm, capsys, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    text = (ROOT / "README.md").read_text()
    scripts = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    names = {}
    for script in scripts:  # the later ones go on where the first ended
        if "torch" in script:  # see tests/torch
            continue
        if "import jax" in script and importlib.util.find_spec("jax") is None:
            continue
        exec(compile(script, "README.md", "exec"), names)
    np.testing.assert_allclose(names["centers"], k_means(), rtol=1e-12)
    out = capsys.readouterr().out
    if comm.rank == 0:
        assert re.fullmatch(
            rf"rank 0 of {comm.size}: .*\n(loss=\d\.\d{{6}}\n){{3}}", out
        )
        losses = [float(line.partition("=")[2]) for line in out.splitlines()[1:]]
        assert losses[2] < losses[0] < 1.0
