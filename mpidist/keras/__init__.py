"""Keras models that are trained, evaluated and applied by all ranks.

    model.compile("adam", "mse")
    mpidist.keras.distribute(model, strategy)
    model.fit(x, y, batch_size=64)  # 64 is the size of the global batch

For Keras' backends PyTorch and JAX. `import mpidist` does not import this. Import it
before models are made, as JAX must not have computed anything: see `mpidist.jax`.
"""

from __future__ import annotations

try:
    import keras as _keras
except ImportError as error:
    raise ImportError(
        "mpidist.keras needs Keras, which is not installed: pip install keras"
    ) from error

from mpidist.errors import UnsupportedError as _UnsupportedError

if _keras.config.backend() in ("tensorflow", "openvino", "numpy"):
    raise _UnsupportedError(
        f"mpidist.keras: Keras has the backend {_keras.config.backend()!r}; set "
        "KERAS_BACKEND=torch or KERAS_BACKEND=jax before it is imported"
    )

from mpidist.keras.model import distribute
from mpidist.keras.resume import Resume

__all__ = ["Resume", "distribute"]
