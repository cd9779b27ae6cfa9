"""The private parts of Keras that this room needs, tried on what `.ci/versions` names.

Of methods that begin with "_", these are replaced: `_symbolic_build` of models, which
Keras calls before the first step, their `_compute_loss`, and `_moments` of batch
normalisations.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
    can_convert_arrays,
)
from keras.src.trainers.data_adapters.data_adapter import DataAdapter
from keras.src.utils import rng_utils

ranks: Any
if keras.config.backend() == "torch":
    from mpidist.keras import on_torch as ranks
else:
    from mpidist.keras import on_jax as ranks

__all__ = ["DataAdapter", "can_convert_arrays", "in_symbolic_scope", "ranks"]
split = array_slicing.train_validation_split


def array_inputs(*arrays: Any, **options: Any) -> tuple[Any, int]:
    """Return `x`, `(x, y)` or `(x, y, weight)` as NumPy arrays, and the batch size.

    By Keras' own rules for `fit`; absent parts are None.
    """
    given = ArrayDataAdapter(*arrays, **options)

    def as_numpy(leaf: Any) -> Any:
        return None if leaf is None else leaf.convert_to_numpy(leaf[slice(None)])

    leaves = array_slicing.convert_to_sliceable(given._inputs, target_backend="numpy")
    return keras.tree.map_structure(as_numpy, leaves), int(given._batch_size)


def layers_of(model: Any) -> list[Any]:
    """Return a model and all its layers, at any depth."""
    return list(model._flatten_layers())


def losses_of(model: Any) -> list[Any]:
    """Return the loss functions of a model that is built."""
    loss = model._compile_loss
    return [] if loss is None else [part.loss for part in loss._flat_losses]


def metrics_of(model: Any) -> list[Any]:
    """Return the metrics of a model that is built."""
    compiled = model._compile_metrics
    return [*model.metrics, *(() if compiled is None else compiled.metrics)]


def loss_of(model: Any, y: Any, outputs: Any) -> float:
    """Return the compiled loss of outputs; nothing notes it."""
    with keras.StatelessScope():
        return float(keras.ops.convert_to_numpy(model._compile_loss(y, outputs)))


def is_masked(outputs: Any) -> bool:
    """Return whether the loss of outputs would leave out a part of them."""
    return any(get_keras_mask(x) is not None for x in keras.tree.flatten(outputs))


def reduction_axes(layer: Any) -> list[int]:
    """Return the axes over which a batch normalisation takes its moments."""
    return list(layer._reduction_axes)


@functools.cache
def weighs_activity() -> bool:
    """Return whether activity regularizers are means over rows, as in new versions."""
    layer = keras.layers.ActivityRegularization(l2=1.0)
    one, two = (
        float((layer(np.ones((n, 1), "f4")), layer.losses[0])[1]) for n in (1, 2)
    )
    return one == two


def begin_at(model: Any, epoch: int | None) -> None:
    """Let `fit` begin at an epoch; None for where its argument says."""
    model._initial_epoch = epoch


def synchronize(model: Any) -> None:
    """Write what JAX computes with into the variables."""
    getattr(model, "jax_state_sync", lambda: None)()


def seed_of_shuffles() -> int:
    """Return the seed of `keras.utils.set_random_seed`; 0 without one."""
    return int(getattr(rng_utils, "get_random_seed", lambda: None)() or 0)
