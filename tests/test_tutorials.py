"""The tutorials and the pages for those who come from elsewhere, as they stand there.

A page's blocks of Python are one program. What it prints is on the page, and the same
on any number of ranks. A notebook is made of it by jupytext, and is not committed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import h5py
import launching
import numpy as np
import pytest

DOCS = Path(__file__).parents[1] / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.md"))
GUIDES = sorted((DOCS / "coming_from").glob("*.md"))


def blocks(page, language):
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, page.read_text(), re.M | re.S)


def run(page):
    names = {"__name__": "__main__"}
    exec(compile("\n".join(blocks(page, "python")), str(page), "exec"), names)
    return names


def test_there_are_pages():
    assert TUTORIALS
    assert GUIDES


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_says(comm, page, capsys, monkeypatch, mpi_tmp_path):
    monkeypatch.chdir(mpi_tmp_path)
    run(page)
    if comm.rank == 0:
        assert [capsys.readouterr().out] == blocks(page, "text")


def test_the_regression_is_that_of_numpy(comm):
    names = run(DOCS / "tutorials/regression.md")
    x, y = names["x"], names["y"]
    best = np.linalg.lstsq(x, y)[0]
    # The last steps see some of the rows, so they end near what fits all of them
    np.testing.assert_allclose(names["weights"].numpy(), best, atol=0.02)


def test_k_means_is_that_of_scikit_learn(comm):
    from sklearn.cluster import KMeans
    from sklearn.datasets import load_digits

    names = run(DOCS / "tutorials/kmeans.md")
    rows = load_digits().data
    alone = KMeans(10, init=rows[:10], n_init=1, max_iter=20, tol=0).fit(rows)
    np.testing.assert_allclose(
        names["centers"], alone.cluster_centers_, rtol=1e-9, atol=1e-9
    )


def test_pca_is_that_of_numpy(comm, monkeypatch, mpi_tmp_path):
    monkeypatch.chdir(mpi_tmp_path)
    names = run(DOCS / "tutorials/pca.md")
    rows = np.concatenate([names["block"](number) for number in range(20)])
    centred = rows - rows.mean(axis=0)
    _, sizes, directions = np.linalg.svd(centred, full_matrices=False)
    ratios = (sizes**2 / (sizes**2).sum())[:3]
    np.testing.assert_allclose(names["explained"], ratios, rtol=1e-9)
    same = np.abs(names["components"] @ directions[:3].T)  # but for the sign
    np.testing.assert_allclose(same, np.eye(3), atol=1e-9)
    with h5py.File("scores.h5") as file:
        x, scores = file["x"][:], file["scores"][:]
    comm.Barrier()  # the folder is removed
    expected = (x - rows.mean(axis=0)) @ names["components"].T
    np.testing.assert_allclose(scores, expected, atol=1e-9)
    np.testing.assert_array_equal(np.sort(x, axis=0), np.sort(rows, axis=0))


def test_mpi4py_and_mpidist_give_the_same(comm):
    names = run(DOCS / "coming_from/mpi4py.md")
    np.testing.assert_array_equal(names["total"], names["total_theirs"])
    np.testing.assert_array_equal(names["everything"], names["everything_theirs"])
    everyone = [np.arange(rank + 1.0) for rank in range(comm.size)]
    np.testing.assert_array_equal(names["everything"], np.concatenate(everyone))
    assert names["mean"] == names["mean_theirs"] == np.concatenate(everyone).mean()


def why_no_notebooks():
    """Return why no notebook can be made and executed, or None."""
    needed = ("jupytext", "nbconvert", "ipykernel")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"there is no {', '.join(missing)}" if missing else None


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_is_a_notebook(page, tmp_path):
    missing = why_no_notebooks()
    if missing and os.environ.get("GATE_NEED_NOTEBOOKS") != "1":
        pytest.skip(missing)
    assert not missing
    path = tmp_path / f"{page.stem}.ipynb"
    make = [sys.executable, "-m", "jupytext", "--to", "notebook", "--execute"]
    make += ["--run-path", str(tmp_path)]
    command = [*make, "--output", str(path), str(page)]
    # JUPYTER_PLATFORM_DIRS: without it, jupyter_core 5 warns
    ended = launching.run(command, JUPYTER_PLATFORM_DIRS="1")
    assert ended.returncode == 0, ended.stderr
    cells = json.loads(path.read_text())["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    assert "\n".join(code).split() == "\n".join(blocks(page, "python")).split()
    printed = [
        "".join(output["text"])
        for cell in cells
        for output in cell.get("outputs", ())
        if output.get("name") == "stdout"
    ]
    assert ["".join(printed)] == blocks(page, "text")


def test_torch_ends_with_the_weights_of_one_process(comm):
    if os.environ.get("GATE_NEED_TORCH") != "1":
        pytest.importorskip("torch")
    import torch

    names = run(DOCS / "coming_from/torch_ddp.md")
    torch.manual_seed(0)
    alone = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    x = torch.from_numpy(names["x"])
    for rows in x.split(4):
        optimizer.zero_grad()
        error = alone(rows) - rows.sum(1, keepdim=True)
        (error**2).mean().backward()
        optimizer.step()
    for ours, theirs in zip(names["model"].parameters(), alone.parameters()):
        np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
