"""Tests of `mpidist.keras`, skipped where there is no Keras; on one of its backends."""

import importlib.util
import os

import pytest

found = [n for n in ("torch", "jax") if importlib.util.find_spec(n)]
if importlib.util.find_spec("keras") is None or not found:
    assert os.environ.get("GATE_NEED_KERAS") != "1", "Keras is not installed"
else:
    os.environ.setdefault("KERAS_BACKEND", found[0])  # before Keras is imported
    if os.environ["KERAS_BACKEND"] == "torch":
        import torch

        torch.set_num_threads(1)  # ranks share the cores
    import keras

    import mpidist.keras


@pytest.fixture(autouse=True)
def seeded():
    """Each test makes the same weights, on all ranks."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)


@pytest.fixture
def distribute(strategy):
    """A function that makes a model one of all ranks."""
    return lambda model: mpidist.keras.distribute(model, strategy)
