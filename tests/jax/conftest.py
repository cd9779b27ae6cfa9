"""What tests of `mpidist.jax` share."""

import pytest


@pytest.fixture
def enable_x64():
    """The context in which JAX has 64-bit numbers, by the name of its version."""
    jax = pytest.importorskip("jax")
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64
    return jax.experimental.enable_x64
