"""What would give other numbers on several ranks than in one process, by name."""

from __future__ import annotations

import operator
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from mpidist.errors import ContextError, UnsupportedError
from mpidist.keras import compat
from mpidist.keras.data import unpack

_MEANS = ("sum_over_batch_size", "mean")
_TOLERANCE = 1e-3


def refuse(what: str) -> None:
    """Raise an UnsupportedError, on all ranks alike."""
    raise UnsupportedError(f"mpidist.keras: {what}")


def require_no_distribution() -> None:
    """Raise a ContextError if Keras' own distribution is in use."""
    if keras.distribution.distribution() is not None:
        raise ContextError(
            "mpidist.keras and keras.distribution would both divide the rows; call "
            "keras.distribution.set_distribution(None)"
        )


def require_supported(model: Any, example: Any) -> None:
    """Raise an UnsupportedError that names what cannot be right.

    Args:
      model: one that is built.
      example: a batch.
    """
    for loss in compat.losses_of(model):
        if loss.reduction not in _MEANS:
            refuse(
                f"the loss {loss.name} has reduction={loss.reduction!r}, and must "
                f"be a mean over rows: {_MEANS[0]!r}"
            )
        if getattr(loss, "ignore_class", None) is not None:
            refuse(
                f"the loss {loss.name} has ignore_class, so it is a mean over the "
                "rows of other classes; use sample_weight"
            )
    if model._compile_loss is not None:
        _try_loss(model, *unpack(example)[:2])
    for metric in compat.metrics_of(model):
        owner = next(c for c in type(metric).__mro__ if "update_state" in vars(c))
        is_known = owner.__module__.startswith("keras.")
        if not (is_known or getattr(metric, "additive", False)):
            refuse(
                f"the metric {metric.name} has an update_state of its own; set "
                f"{type(metric).__name__}.additive = True if states of ranks may "
                "be added up"
            )
    for layer in compat.layers_of(model):
        if (
            getattr(layer, "activity_regularizer", None)
            and not compat.weighs_activity()
        ):
            refuse(
                f"the activity_regularizer of {layer.name} is a sum over rows in "
                f"Keras {keras.__version__}"
            )
        modules: Any = getattr(getattr(layer, "module", None), "modules", list)()
        if any("BatchNorm" in c.__name__ for c in set(map(type, modules))):
            refuse(
                f"{layer.name} has a BatchNorm of PyTorch, which is of one rank's "
                "rows; use keras.layers.BatchNormalization"
            )
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            refuse(f"{variable.path} is quantized, and takes its gradient as a value")


def optimizers_of(model: Any) -> list[Any]:
    """Return the optimizers of a model, those in its attributes included."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    found = [one for one in found if isinstance(one, keras.optimizers.Optimizer)]
    return list({id(one): one for one in found}.values())


def scales_losses(optimizer: Any) -> bool:
    """Return whether an optimizer multiplies losses, so that gradients fit 16 bits."""
    is_dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return is_dynamic or optimizer.loss_scale_factor is not None


def batch_norms_of(model: Any) -> list[Any]:
    """Return the batch normalisations of a model, at any depth."""
    kind = keras.layers.BatchNormalization
    return [layer for layer in compat.layers_of(model) if isinstance(layer, kind)]


def _try_loss(model: Any, x: Any, y: Any) -> None:
    """Raise if the loss of four rows is not the mean of those of their halves."""
    random = np.random.default_rng(0)

    def rows_like(leaf: Any) -> Any:  # integers are 0, which is always a class
        shape = (4, *(length or 1 for length in leaf.shape[1:]))
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        return ops.cast(random.uniform(0.1, 0.9, shape), dtype)

    def symbolic(leaf: Any) -> Any:
        return keras.KerasTensor(
            leaf.shape, keras.backend.standardize_dtype(leaf.dtype)
        )

    try:
        outputs = model.compute_output_spec(tree.map_structure(symbolic, x))
        both = [tree.map_structure(rows_like, part) for part in (y, outputs)]
        whole, first, second = (
            compat.loss_of(model, *tree.map_structure(operator.itemgetter(rows), both))
            for rows in (slice(0, 4), slice(0, 2), slice(2, 4))
        )
    except Exception:  # it does not take such numbers: the first step shows why
        return
    if abs(whole - (first + second) / 2) > _TOLERANCE * (abs(whole) + _TOLERANCE):
        refuse(
            f"the loss of {model.name} is no mean over rows: it is {whole:.6g} of "
            f"four rows, and {first:.6g} and {second:.6g} of their halves"
        )
