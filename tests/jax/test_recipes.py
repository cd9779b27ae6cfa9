"""The manual's recipes for Flax NNX, Equinox and optax, where these are installed."""

import re
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpidist

jax = pytest.importorskip("jax")
mj = pytest.importorskip("mpidist.jax")
PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
RECIPES = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
LIBRARIES = ["flax", "equinox"]


def train(strategy, recipe):
    """Return weights and statistics after some batches, the last of one row."""
    x = np.random.default_rng(0).normal(size=(33, 3)).astype("f")
    rows = mpidist.Dataset.from_tensor_slices((x, x.sum(1))).batch(8)
    with strategy.scope():
        found = {}
        exec(recipe, found)
        state = [found[name] for name in ("params", "stats", "moments")]
        for batch in mj.as_jax(strategy.experimental_distribute_dataset(rows)):
            *state, loss = found["step"](*state, *batch)
    return [*map(np.asarray, jax.tree.leaves(state)), np.asarray(loss)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_recipes(comm, strategy, mpi_tmp_path, library):
    pytest.importorskip(library)
    pytest.importorskip("optax")
    (recipe,) = [text for text in RECIPES if library in text]
    got = train(strategy, recipe)
    # Raises if a weight or statistic differs between replicas
    mpidist.Checkpoint(strategy=strategy, got=got).save(mpi_tmp_path / "a")
    assert all(np.isfinite(leaf).all() for leaf in got)
    if library == "flax":  # as on one process
        alone = mpidist.MirroredStrategy(["CPU:0"], communicator=MPI.COMM_SELF)
        for a, b in zip(got, train(alone, recipe), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
        alone.experimental_finalize()


def test_lbfgs(comm, strategy):
    """Few steps find what solves the equations of all rows, the same on all ranks."""
    pytest.importorskip("optax")
    (recipe,) = [text for text in RECIPES if "lbfgs" in text]
    x = np.random.default_rng(0).normal(size=(33, 3)).astype("f")
    y = x.sum(1) + np.sin(x[:, 0])
    rows = mpidist.Dataset.from_tensor_slices((x, y)).batch(33).repeat(8)
    with strategy.scope():
        found = {}
        exec(recipe, found)
        params, state = found["params"], found["state"]
        for batch in mj.as_jax(strategy.experimental_distribute_dataset(rows)):
            params, state, _ = found["step"](params, state, *batch)
    np.testing.assert_allclose(params, np.linalg.lstsq(x, y)[0], rtol=1e-4)
    assert len(set(comm.allgather(np.asarray(params).tobytes()))) == 1
