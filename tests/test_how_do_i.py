"""The page "How do I ...?": answers are executed, and give what one process gives."""

import importlib.util
import re
from itertools import filterfalse
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mpidist

PAGE = Path(__file__).parents[1] / "docs" / "how_do_i.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)
FIRST, *PARTS = re.split(r"^### ", PAGE.read_text(), flags=re.M)
ANSWERS = {part.partition("\n")[0]: BLOCK.findall(part) for part in PARTS}
PREFACE = BLOCK.findall(FIRST)
OPTIONAL = {
    *(
        "torch",
        "jax",
        "flax",
        "equinox",
        "optax",
        "pandas",
        "hdf5plugin",
        "sklearn",
        "zarr",
    )
}
# Answers that may be executed on one of the ranks alone
TRAINING = PAGE.read_text().partition("## Train\n")[2].partition("\n## ")[0]
TRAINING = re.findall(r"^### (?!Compare)(.*)", TRAINING, re.M)
X = np.arange(30.0).reshape(10, 3) / 30
Y = X @ [1.0, 2.0, 3.0]


def is_missing(block):
    """Return whether a block needs a package that is not installed."""
    needed = set(re.findall(r"^(?:import|from) (\w+)", block, re.M))
    needed |= {"torch"} if block.startswith("# PyTorch") else set()
    needed |= {"pyarrow"} if "parquet" in block else set()
    is_found = {name: importlib.util.find_spec(name) for name in needed}
    return any(is_found[name] is None for name in needed & {*OPTIONAL, "pyarrow"})


def short(title):
    return re.split(r" \(|:", title)[0]


def write_files():
    """Write the files that the answers read."""
    table = np.column_stack([X, Y])
    options = {"delimiter": ",", "header": "a,b,c,y", "comments": ""}
    np.savetxt("rows.csv", table, **options)
    for n in range(3):
        np.savetxt(f"part-{n}.csv", table[n::3], **options)
    np.save("images.npy", X)
    with h5py.File("weather.nc", "w") as file:
        t = file.create_dataset("t", data=np.array([0, 10, -1, 30], "i2"))
        # As netCDF's library writes them
        t.attrs.update(scale_factor=[0.1], add_offset=[273.0])
        t.attrs["_FillValue"] = np.array([-1], "i2")
    with h5py.File("samples.h5", "w") as file:
        for n, row in enumerate(X):
            file[f"sample-{n}"] = row
    with h5py.File("cells.h5ad", "w") as file:
        matrix = file.create_group("X")
        matrix["data"] = np.arange(1, 6, dtype="f4")
        matrix["indices"] = [0, 2, 1, 0, 3]
        matrix["indptr"] = [0, 2, 2, 3, 5]
        matrix.attrs["shape"] = (4, 4)
    if importlib.util.find_spec("pyarrow") and importlib.util.find_spec("pandas"):
        import pandas

        frame = pandas.DataFrame({"width": X[:, 0], "height": X[:, 1]})
        frame.to_parquet("rows.parquet")
    if importlib.util.find_spec("zarr"):
        import zarr

        zarr.save_array("images.zarr", X)
    if importlib.util.find_spec("hdf5plugin"):
        import hdf5plugin

        with h5py.File("blosc.h5", "w") as file:
            file.create_dataset("x", data=X, chunks=(2, 3), **hdf5plugin.Blosc())


@pytest.fixture
def files(comm, mpi_tmp_path, monkeypatch):
    monkeypatch.chdir(mpi_tmp_path)
    if comm.rank == 0:
        write_files()
    comm.Barrier()


def run(title, communicator=MPI.COMM_WORLD):
    """Execute an answer, and return its names."""
    blocks = [block for block in ANSWERS[title] if not is_missing(block)]
    if not blocks:
        pytest.skip("a package is not installed")
    names = {"communicator": communicator}
    for block in [*filterfalse(is_missing, PREFACE), *blocks]:
        block = block.replace('(["CPU:0"])', '(["CPU:0"], communicator=communicator)')
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("title", ANSWERS)
def test_answers_run(files, title):
    names = run(title)
    check = CHECKS.get(short(title))
    if check is not None:
        check(names)


@pytest.mark.parametrize("title", TRAINING)
def test_results_are_those_of_one_process(comm, files, title):
    names, alone = run(title), run(title, MPI.COMM_SELF)
    for name in ("w", "loss", "best", "rate"):
        if name in alone:
            np.testing.assert_allclose(names[name], alone[name], rtol=1e-9, atol=1e-12)
    if "model" in alone:
        for ours, theirs in zip(
            names["model"].parameters(), alone["model"].parameters()
        ):
            difference = abs(ours.detach() - theirs.detach()).max()
            assert difference < (1e-6 if "LBFGS" in str(ANSWERS[title]) else 1e-12)


def all_rows(names, key="data"):
    """Return the rows of a dataset, those of all ranks, batch by batch."""
    strategy = names["strategy"]
    batches = strategy.experimental_distribute_dataset(names[key])
    rows = []
    for batch in mpidist.as_arrays(batches):
        for part in strategy.gather_objects(batch):
            if isinstance(part, dict):
                rows += [dict(zip(part, row)) for row in zip(*part.values())]
            else:
                rows += list(zip(*part)) if isinstance(part, tuple) else list(part)
    return rows


def batches(names):
    return list(names["rows"].shuffle(seed=0).batch(4))


def descend(names, limit=np.inf):
    """Return what one process makes of w."""
    w = np.zeros(3)
    for x, y in batches(names):
        gradient = x.T @ (x @ w - y) / len(x)
        w = w - 0.5 * gradient * min(1.0, limit / np.linalg.norm(gradient))
    return w


def same(got, expected):
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)


def csv(names):
    rows = sorted((*x, y) for x, y in all_rows(names))
    same(rows, sorted((*x, y) for x, y in zip(X, Y)))


def parquet(names):
    same([(row["width"], row["height"]) for row in all_rows(names)], X[:, :2])


def sparse(names):
    dense = [[1, 0, 2, 0], [0, 0, 0, 0], [0, 3, 0, 0], [4, 0, 0, 5]]
    same(all_rows(names), dense)


def strings(names):
    rows = [(row["text"], row["number"]) for row in all_rows(names)]
    assert rows == [("cat", 1), ("dog", 2), ("cat", 1), ("bird", 0), ("dog", 2)]
    assert names["settings"] == {"rate": 0.5, "layers": [64, 10]}
    assert [r["rank"] for r in names["reports"]] == [*range(names["strategy"].size)]


def pad(names):
    rows = all_rows(names)
    assert [row["length"] for row in rows] == [3, 1, 4, 2, 5]
    assert [row["tokens"].tolist() for row in rows][2:4] == [
        [1, 2, 3, 4, 0],
        [1, 2, 0, 0, 0],
    ]


def folds(names):
    inside = sorted(y for _, y in all_rows(names, "training"))
    outside = [y for _, fold in enumerate(names["folds"]) for _, y in fold]
    assert len(inside) == 8
    same(sorted(outside), Y)
    same(sorted(inside + [y for _, y in names["test"]]), Y)


def augment(names):
    rows = all_rows(names)
    assert len(rows) == 30
    same([x for x, _ in rows], [x for x, _ in names["data"].unbatch()])
    assert len({x[0] for x, _ in rows}) == 30
    same(sorted(y for _, y in rows), sorted([*Y] * 3))


def sweep(names):
    assert set(names["found"]) == {"0.1", "0.3", "0.5"}
    assert names["best"] == "0.5"


def predicted(names):
    with h5py.File("predicted.h5") as file:
        same(file["y"][:], Y)
        same(file["predicted"][:], X @ names["w"])


CHECKS = {
    "Read CSV files": csv,
    "Read npy files": lambda names: same(all_rows(names), X),
    "Read Parquet files": parquet,
    "Read netCDF files": lambda names: same(all_rows(names), [273, 274, np.nan, 276]),
    "Read HDF5 with Blosc, Zstandard, LZ4 or Bitshuffle filters": (
        lambda names: same(all_rows(names), X)
    ),
    "Read HDF5 with one dataset for each sample": (
        lambda names: same(all_rows(names), X)
    ),
    "Read sparse matrices": sparse,
    "Use strings and Python objects": strings,
    "Pad sequences of unlike lengths": pad,
    "Cross-validate": folds,
    "Write my own loop over batches in NumPy": (
        lambda names: same(names["w"], descend(names))
    ),
    "Clip gradients": lambda names: same(names["w"], descend(names, 1.0)),
    "Use another optimizer, such as L-BFGS of SciPy": (
        lambda names: np.testing.assert_allclose(X @ names["w"], Y, atol=1e-3)
    ),
    "Augment rows at random": augment,
    "Compare settings": sweep,
    "Predict into a file": predicted,
}


def test_the_checks_are_those_of_answers():
    assert {short(name) for name in ANSWERS} >= set(CHECKS)


class Ended(Exception):
    """The job ended after a save."""


class EndingManager(mpidist.CheckpointManager):
    """Ends the job after its first save."""

    def save(self, *args, **kwargs):
        super().save(*args, **kwargs)
        raise Ended


def test_a_resumed_job_reads_what_the_ended_one_had_not(files, monkeypatch):
    (title,) = [title for title in ANSWERS if title.startswith("Resume a job")]
    blocks = [block for block in ANSWERS[title] if not is_missing(block)]
    for number, block in enumerate(blocks):
        monkeypatch.setitem(ANSWERS, "whole", [block.replace("run", f"a{number}")])
        monkeypatch.setitem(ANSWERS, "parts", [block.replace("run", f"b{number}")])
        whole = run("whole")
        with monkeypatch.context() as patch:
            patch.setattr(mpidist, "CheckpointManager", EndingManager)
            with pytest.raises(Ended):
                run("parts")
        parts = run("parts")
        if "model" in parts:
            for one, other in zip(*(n["model"].parameters() for n in (whole, parts))):
                assert one.equal(other)
        else:
            np.testing.assert_array_equal(whole["state"].w, parts["state"].w)
