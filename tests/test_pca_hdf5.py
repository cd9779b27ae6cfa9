"""The job jobs/pca_hdf5.py against NumPy on the same rows, read by plain h5py."""

import re

import h5py
import launching
import numpy as np
import pytest
from all_ranks import on_root

import mpidist

EPSILON = np.finfo(np.float64).eps


@pytest.fixture(scope="module")
def job():
    return launching.load_job("pca_hdf5")


@pytest.fixture
def strategy(comm):
    strategy = mpidist.MirroredStrategy(["CPU:0"], communicator=comm)
    yield strategy
    strategy.experimental_finalize()


def correlated(rows, shape=(2, 3), offset=0.0):
    """Rows whose principal components have well separated variances."""
    rng = np.random.default_rng(7)
    features = int(np.prod(shape))
    mixing = np.linalg.qr(rng.normal(size=(features, features)))[0]
    spread = 2.0 ** -np.arange(features)
    values = (rng.normal(size=(rows, features)) * spread) @ mixing
    return (values + offset).reshape(rows, *shape)


def write_files(comm, folder, rows, lengths):
    """Return the names of files that hold `rows`, divided by `lengths`."""
    paths = [folder / f"{i}.h5" for i in range(len(lengths))]
    if comm.rank == 0:
        edges = np.cumsum([0, *lengths])
        assert edges[-1] == len(rows)
        for path, start, stop in zip(paths, edges[:-1], edges[1:], strict=True):
            with h5py.File(path, "w") as file:
                file["rows"] = rows[start:stop]
    comm.Barrier()
    return [str(path) for path in paths]


def read(path):
    with h5py.File(path, "r", locking=False) as file:
        return {name: file[name][...] for name in file}


def arguments(files, output, components=2, batch=8, *more):
    numbers = ["--components", str(components), "--batch", str(batch)]
    return [*files, "--dataset", "rows", *numbers, "--output", str(output), *more]


def oracle(files):
    """NumPy's mean, covariance and centred rows, from long doubles."""
    rows = np.concatenate([read(file)["rows"] for file in files])
    rows = rows.reshape(len(rows), -1).astype(np.longdouble)
    # The mean of large values would cost digits even of long doubles
    shift = rows.min(axis=0)
    mean = (rows - shift).mean(axis=0)
    covariance = np.cov(rows - shift, rowvar=False).reshape(2 * mean.shape)
    parts = shift + mean, covariance, rows - shift - mean
    return tuple(part.astype(np.float64) for part in parts)


def check(result, files, components):
    mean, covariance, centred = oracle(files)
    values, vectors = np.linalg.eigh(covariance)
    directions = result["components"]
    expected = vectors.T[::-1][:components]
    signs = np.sign((directions * expected).sum(axis=1, keepdims=True))

    largest = np.abs(mean).max() + np.abs(centred).max()
    close(result["mean"], mean, 1e-15 * largest)
    close(result["covariance"], covariance, 1e-14 * values[-1])
    close(result["explained_variance"], values[::-1][:components], 1e-14 * values[-1])
    close(directions, signs * expected, 1e-12)
    if "scores" in result:
        # Also says that rows are in the order of the files
        close(result["scores"], centred @ directions.T, 1e-14 * np.abs(centred).max())


def close(actual, expected, tolerance):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)


@pytest.mark.parametrize("offset", [0.0, 1e8])
@pytest.mark.parametrize("batch", [1, 7, 8, 100])
def test_uneven_files_give_numpys_numbers(
    job, comm, strategy, mpi_tmp_path, offset, batch
):
    rows = correlated(40, offset=offset)
    files = write_files(comm, mpi_tmp_path, rows, [19, 0, 1, 20])
    output = mpi_tmp_path / "pca.h5"
    job.main(arguments(files, output, 4, batch, "--scores"), strategy)
    result = read(output)
    names = "mean covariance components explained_variance scores"
    assert set(result) == set(names.split())
    assert all(array.dtype == np.float64 for array in result.values())
    check(result, files, 4)


def test_the_offset_defeats_the_naive_formula(comm, mpi_tmp_path):
    files = write_files(comm, mpi_tmp_path, correlated(40, offset=1e8), [40])
    rows = read(files[0])["rows"].reshape(40, -1)
    naive = (rows.T @ rows - 40 * np.outer(rows.mean(0), rows.mean(0))) / 39
    _, covariance, _ = oracle(files)
    assert np.abs(naive - covariance).max() > 0.1 * np.abs(covariance).max()


def with_outlier():
    rows = correlated(30)
    rows[0] *= 1e6
    return rows


def of_dtype(dtype):
    return (correlated(25, shape=(3,)) * 20 + 100).astype(dtype)


# Rows, how files divide them, and the number of components
ROWS = {
    "an outlier in the first row": (with_outlier(), [30], 1),
    "fewer than ranks": (correlated(2, offset=1e8), [1, 1], 1),
    "numbers": (correlated(9, shape=()), [9], 1),
    **{d: (of_dtype(d), [10, 15], 3) for d in ("u1", ">i4", "f4", "f2")},
}


@pytest.mark.parametrize("case", ROWS)
def test_other_rows(job, comm, strategy, mpi_tmp_path, case):
    rows, lengths, components = ROWS[case]
    files = write_files(comm, mpi_tmp_path, rows, lengths)
    output = mpi_tmp_path / "pca.h5"
    job.main(arguments(files, output, components, 8, "--scores"), strategy)
    check(read(output), files, components)


def test_results_do_not_depend_on_the_number_of_ranks(
    job, comm, strategy, mpi_tmp_path
):
    files = write_files(comm, mpi_tmp_path, correlated(40, offset=1e8), [30, 10])
    job.main(arguments(files, mpi_tmp_path / "all.h5", 4, 7, "--scores"), strategy)
    alone = comm.Split(comm.rank)
    single = mpidist.MirroredStrategy(["CPU:0"], communicator=alone)
    output = mpi_tmp_path / f"alone{comm.rank}.h5"
    job.main(arguments(files, output, 4, 7, "--scores"), single)
    single.experimental_finalize()
    alone.Free()
    together = read(mpi_tmp_path / "all.h5")
    for name, expected in read(output).items():
        roundings = 2 if name == "mean" else 100
        largest = np.abs(expected).max()
        close(together[name], expected, roundings * EPSILON * largest)


def test_signs_of_equal_entries_do_not_hang_on_rounding(job):
    tiny = 1e-15
    for tilt in (-tiny, tiny):
        directions = np.array([[-0.5 + tilt, 0.5, 0.0], [0.1, 0.2, -0.9]])
        fixed = job._fix_signs(directions)
        np.testing.assert_allclose(
            fixed, [[0.5, -0.5, 0.0], [-0.1, -0.2, 0.9]], atol=1e-14
        )


def test_rows_that_do_not_vary(job, comm, strategy, mpi_tmp_path, capsys):
    files = write_files(comm, mpi_tmp_path, np.full((6, 2), 1e8), [6])
    output = mpi_tmp_path / "pca.h5"
    job.main(arguments(files, output, 1), strategy)
    np.testing.assert_array_equal(read(output)["covariance"], np.zeros((2, 2)))
    np.testing.assert_array_equal(read(output)["mean"], [1e8, 1e8])
    assert ("explained=nan" in capsys.readouterr().out) == (comm.rank == 0)


def test_rank_0_says_one_line(job, comm, strategy, mpi_tmp_path, capsys):
    files = write_files(comm, mpi_tmp_path, correlated(40), [40])
    job.main(arguments(files, mpi_tmp_path / "pca.h5", 2), strategy)
    captured = capsys.readouterr()
    if comm.rank > 0:
        assert captured.out == captured.err == ""
        return
    values = np.linalg.eigvalsh(oracle(files)[1])
    ratio = values[-2:].sum() / values.sum()
    assert captured.out == (
        f"rows=40 features=6 components=2 explained={ratio:.4f} ranks={comm.size}\n"
    )
    assert "moments" in captured.err


def test_without_scores_an_older_output_is_replaced(job, comm, strategy, mpi_tmp_path):
    files = write_files(comm, mpi_tmp_path, correlated(12), [12])
    output = mpi_tmp_path / "pca.h5"
    job.main(arguments(files, output, 2, 8, "--scores"), strategy)
    comm.Barrier()
    job.main(arguments(files, output, 1), strategy)
    result = read(output)
    assert "scores" not in result
    check(result, files, 1)
    assert sorted(p.name for p in mpi_tmp_path.iterdir()) == ["0.h5", "pca.h5"]


def with_nan():
    rows = correlated(12, shape=(4,))
    rows[11, 2] = np.nan
    return rows


def unlike(given, name):
    given[given.index("rows")] = name
    return given


# The rows of the files, their number, how it is called, and the error
TWELVE = correlated(12)
FAILURES = {
    "no output folder": (
        *(TWELVE, 2, lambda f, out: arguments(f, out.parent / "none" / "pca.h5")),
        *(mpidist.ArgumentError, "there is no folder"),
    ),
    "output is a folder": (
        *(TWELVE, 2, lambda f, out: arguments(f, out.parent)),
        *(mpidist.ArgumentError, "is a folder"),
    ),
    "output is an input": (
        *(TWELVE, 2, lambda f, out: arguments(f, f[1])),
        *(mpidist.ArgumentError, "one of the input files"),
    ),
    "no input file": (
        *(TWELVE, 2, lambda f, out: arguments([*f, "missing.h5"], out)),
        *(mpidist.DataError, "missing.h5"),
    ),
    # Of one file, as each rank raises the error of the file that it has looked at
    "no input dataset": (
        *(TWELVE, 1, lambda f, out: unlike(arguments(f, out), "columns")),
        *(mpidist.DataError, "no dataset 'columns'"),
    ),
    "too many components": (
        *(TWELVE, 2, lambda f, out: arguments(f, out, 7), mpidist.ArgumentError),
        "--components 7 is too many: 12 rows of 6 features have 6",
    ),
    "no rows": (correlated(0), 1, arguments, mpidist.DataError, "there are 0"),
    "one row": (correlated(1), 1, arguments, mpidist.DataError, "there are 1"),
    "a nan that one rank reads": (
        *(with_nan(), 1, lambda f, out: arguments(f, out, 2, 4)),
        *(mpidist.DataError, re.escape("features [2]")),
    ),
    "complex numbers": (
        *(np.ones((4, 2), complex), 1, arguments),
        *(mpidist.DataError, "not complex128"),
    ),
    "a write that fails": (
        *(TWELVE, 2, lambda f, out: arguments(f, out, 2, 8, "--scores")),
        *(OSError, "No space left"),
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_a_failure_is_raised_on_all_ranks_and_leaves_what_was_there(
    job, comm, strategy, mpi_tmp_path, monkeypatch, case
):
    rows, count, call, kind, match = FAILURES[case]
    lengths = [len(rows) // count] * count
    files, output = (
        write_files(comm, mpi_tmp_path, rows, lengths),
        mpi_tmp_path / "pca.h5",
    )
    on_root(comm, output.write_bytes, b"an older result")
    before = sorted(mpi_tmp_path.iterdir())
    comm.Barrier()

    def full(*_):
        raise OSError(28, "No space left on device")

    if kind is OSError:
        monkeypatch.setattr(job.ResultFile, "append_scores", full)
    with pytest.raises(kind, match=match) as caught:
        job.main(call(files, output), strategy)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    assert sorted(mpi_tmp_path.iterdir()) == before
    assert output.read_bytes() == b"an older result"
    # The strategy can go on
    assert strategy.reduce("SUM", 1) == comm.size


def test_files_left_out_tell_how_to_use_it(job, comm, strategy, capsys):
    with pytest.raises(SystemExit) as caught:
        job.main(["--dataset", "rows", "--output", "pca.h5"], strategy)
    assert caught.value.code == 2
    assert "required: FILES" in capsys.readouterr().err
