"""The tutorials and the pages for those who come from elsewhere, as they stand there.

A page's blocks of Python are one program. What it prints is on the page, and the same
on any number of ranks. A notebook is made of it by jupytext, and is not committed.
"""

import copy
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

import mpidist

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


def require_packages(page):
    """Skip a page whose framework is not installed, unless the gate asks for it."""
    for package in ("torch", "jax", "keras"):
        if f"import {package}\n" in page.read_text():
            if package == "keras" and os.environ.get("KERAS_BACKEND") == "jax":
                pytest.skip("the page has what PyTorch's random weights give")
            if os.environ.get(f"GATE_NEED_{package.upper()}") == "1":
                continue
            pytest.importorskip(package)


def test_there_are_pages():
    assert TUTORIALS
    assert GUIDES


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_says(comm, page, capsys, monkeypatch, mpi_tmp_path):
    require_packages(page)
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


@pytest.mark.slow
def test_k_means_is_that_of_scikit_learn(comm):
    from sklearn.cluster import KMeans
    from sklearn.datasets import load_digits

    names = run(DOCS / "tutorials/kmeans.md")
    rows = load_digits().data
    alone = KMeans(10, init=rows[:10], n_init=1, max_iter=20, tol=0).fit(rows)
    np.testing.assert_allclose(
        names["centers"], alone.cluster_centers_, rtol=1e-9, atol=1e-9
    )


@pytest.mark.slow
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


def test_tensorflow_s_program_in_numpy(comm, capsys, monkeypatch, mpi_tmp_path):
    monkeypatch.chdir(mpi_tmp_path)
    names = run(DOCS / "coming_from/tf_distribute.md")
    w, x = np.zeros(3), np.arange(30.0).reshape(10, 3) / 30
    y = x @ [1.0, 2.0, 3.0]
    for _ in range(5):
        for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
            error = x[rows] @ w - y[rows]
            w -= 0.5 / 4 * 2 * x[rows].T @ error
    np.testing.assert_allclose(names["w"].numpy(), w, rtol=1e-12)
    np.testing.assert_allclose(names["loss"], (error**2).mean(), rtol=1e-9)
    # As TensorFlow 2.21 printed
    if comm.rank == 0:
        printed = "[1.877129 2.019706 2.162283] 0.000750\n"
        assert capsys.readouterr().out == printed


def test_horovod_s_calls_in_numpy(comm):
    names = run(DOCS / "coming_from/horovod.md")
    each = [np.full(3, rank + 1.0) for rank in range(comm.size)]
    np.testing.assert_array_equal(names["total"], sum(each))
    np.testing.assert_allclose(names["mean"], sum(each) / comm.size)
    rows = [np.arange(rank + 1.0) for rank in range(comm.size)]
    np.testing.assert_array_equal(names["rows"], np.concatenate(rows))
    np.testing.assert_array_equal(names["first"], each[0])
    assert names["words"] == [f"rank {rank}" for rank in range(comm.size)]
    mean = np.full((2, 3), (comm.size + 1) / 2)
    np.testing.assert_allclose(names["means"]["w"], mean)
    np.testing.assert_array_equal(names["means"]["b"], np.ones(3))


def test_chainermn_s_job_sees_every_row_once(comm):
    names = run(DOCS / "coming_from/chainermn.md")
    x, w = names["x"], names["w"].numpy()
    np.testing.assert_allclose(names["loss"], ((x @ w - x.sum(1)) ** 2).mean())
    assert np.abs(w).min() > 0


def prose(page):
    """Return a page without its blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


NAMES = [
    (page, name)
    for page in GUIDES
    for name in re.findall(r"`((?:mpidist|strategy|Dataset)\.[\w.]+)", prose(page))
]


@pytest.mark.parametrize(
    ("page", "name"), NAMES, ids=lambda value: getattr(value, "stem", value)
)
def test_names_of_the_pages_exist(strategy, page, name):
    first, *rest = name.split(".")
    if rest[0] == "torch" and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    if rest[0] == "keras":  # importing it chooses a backend for the whole process
        text = (Path(mpidist.__file__).parent / "keras" / "__init__.py").read_text()
        assert f'"{rest[1]}"' in text
        return
    names = {"strategy": strategy, "mpidist": mpidist, "Dataset": mpidist.Dataset}
    found = names[first]
    for attribute in rest:
        found = getattr(found, attribute)


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
    require_packages(page)
    path = tmp_path / f"{page.stem}.ipynb"
    make = [sys.executable, "-m", "jupytext", "--to", "notebook", "--execute"]
    make += ["--set-kernel", "python3", "--run-path", str(tmp_path)]
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


@pytest.mark.slow
def test_images_are_learnt_as_by_torch_alone(comm, monkeypatch, mpi_tmp_path):
    page = DOCS / "tutorials/torch_images.md"
    require_packages(page)
    import torch

    monkeypatch.chdir(mpi_tmp_path)
    names = run(page)
    torch.manual_seed(0)
    alone = copy.deepcopy(names["layers"]).float()
    for layer in alone:
        getattr(layer, "reset_parameters", lambda: None)()
    alone.double()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.5)
    for _ in range(10):
        for batch in names["batches"]:
            x, y = map(torch.from_numpy, batch)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(alone(x), y).backward()
            optimizer.step()
    for ours, theirs in zip(names["model"].parameters(), alone.parameters()):
        np.testing.assert_allclose(ours.detach(), theirs.detach(), rtol=1e-7, atol=1e-9)


def test_the_jax_tutorial_is_that_of_jax_alone(comm):
    page = DOCS / "tutorials/jax.md"
    require_packages(page)
    import jax
    import jax.numpy as jnp

    names = run(page)
    params = {"w": jnp.zeros((64, 10)), "b": jnp.zeros(10)}
    of_all = jax.jit(jax.value_and_grad(names["mean_loss"]))
    losses = []
    for _ in range(5):
        for x, y in names["batches"]:
            loss, gradient = of_all(params, x, y)
            params = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient)
            losses.append(float(loss))
    np.testing.assert_allclose(names["losses"], losses, rtol=1e-4)
    np.testing.assert_allclose(names["params"]["w"], params["w"], atol=1e-4)


def test_torch_ends_with_the_weights_of_one_process(comm):
    require_packages(DOCS / "coming_from/torch_ddp.md")
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


def test_the_keras_tutorial_is_that_of_keras_alone(comm, monkeypatch, mpi_tmp_path):
    page = DOCS / "tutorials/keras.md"
    require_packages(page)
    monkeypatch.chdir(mpi_tmp_path)
    names = run(page)
    keras = names["keras"]
    keras.utils.set_random_seed(0)
    alone = names["make_model"]()
    few = names["callbacks"][:2]  # those that do not write
    history = alone.fit(*names["train"], epochs=8, callbacks=few, **names["given"])
    found = names["history"].history
    for name, values in history.history.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4)
    scores = alone.predict(names["test"][0], verbose=0)
    np.testing.assert_allclose(names["scores"], scores, rtol=1e-3, atol=1e-3)
