"""Programs of Keras give what they give in one process, on any number of ranks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

keras = pytest.importorskip("keras")
from keras import layers, tree  # noqa: E402

from mpidist.keras import compat  # noqa: E402

IS_TORCH = keras.config.backend() == "torch"
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(43, 6)).astype("f4")
Y = (np.abs(X.sum(1)) * 1.5).astype("i8") % 3
WEIGHT = RANDOM.uniform(0.5, 2, 43).astype("f4")
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(*more):
    first = layers.Dense(8, activation="relu", kernel_regularizer="l2")
    return keras.Sequential([layers.Input((6,)), first, *more, layers.Dense(3)])


def lazy():
    return keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(3)])


def normalised():
    return dense(layers.BatchNormalization(momentum=0.9))


def convolutional():
    norm = layers.BatchNormalization(momentum=0.5)
    last = layers.Flatten(), layers.Dense(3)
    conv = layers.Conv1D(4, 3, padding="same", use_bias=False), norm, layers.ReLU()
    return keras.Sequential([layers.Input((6,)), layers.Reshape((6, 1)), *conv, *last])


def regularized():
    return dense(layers.Dense(4, activity_regularizer="l2"))


def several():
    """A model with two inputs and two outputs."""
    inputs = {name: layers.Input((6,), name=name) for name in "ab"}
    hidden = layers.Dense(8, "relu")(layers.Concatenate()(list(inputs.values())))
    sizes = {"c": 3, "r": 1}
    outputs = {n: layers.Dense(size, name=n)(hidden) for n, size in sizes.items()}
    return keras.Model(inputs, outputs)


class Subclassed(keras.Model):
    """Built by its first batch; with a train_step in the style of Keras' guides."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(8, "relu"), layers.Dense(3)

    def call(self, x):
        return self.last(self.first(x))


class OwnStep(Subclassed):
    if IS_TORCH:

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(y=y, y_pred=(outputs := self(x, training=True)))
            loss.backward()
            weights = list(self.trainable_weights)
            self.optimizer.apply([w.value.grad for w in weights], weights)
            self._loss_tracker.update_state(loss, sample_weight=len(x))
            for metric in self.metrics[1:]:
                metric.update_state(y, outputs)
            return {"loss": self._loss_tracker.result()}


def two_losses(model, **more):
    losses, scores = {"c": CROSSENTROPY, "r": "mse"}, {"c": ["accuracy"], "r": ["mae"]}
    weights = {"c": 1.0, "r": 0.5}
    model.compile("sgd", losses, metrics=scores, loss_weights=weights, **more)


def many_metrics(model):
    names = ["precision", "recall", "cosine_similarity", "r2_score"]
    kinds = keras.metrics.AUC(name="auc"), keras.metrics.F1Score("macro")
    names += [keras.metrics.RootMeanSquaredError(), "categorical_accuracy"]
    model.add(layers.Softmax())
    model.compile("sgd", "categorical_crossentropy", metrics=[*names, *kinds])


@dataclasses.dataclass
class Program:
    make: Callable[[], Any] = dense
    rows: int = 43
    batch: int = 8
    optimizer: dict[str, Any] = dataclasses.field(default_factory=dict)
    compile: Callable[[Any], None] | dict[str, Any] = dataclasses.field(
        default_factory=dict
    )
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)

    def train(self, distribute):
        """Return all that a program computes, as a nest of arrays."""
        keras.utils.set_random_seed(3)
        model, x, y = self.make(), X[: self.rows], Y[: self.rows]
        if self.compile is two_losses:
            x, y = {"a": x, "b": x[:, ::-1]}, {"c": y, "r": x.sum(1, keepdims=True)}
        if self.compile is many_metrics:
            y = np.eye(3, dtype="f4")[y]
        if callable(self.compile):
            self.compile(model)
        else:
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9, **self.optimizer)
            if "dynamic" in self.compile:
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
            more = {k: v for k, v in self.compile.items() if k != "dynamic"}
            scores = {"metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
            model.compile(optimizer, CROSSENTROPY, **scores, **more)
        distribute(model)
        lines = []
        watching = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: lines.append(dict(logs))
        )
        few = tree.map_structure(lambda rows: rows[:11], (x, y))
        given = {"validation_data": few, "shuffle": False, "epochs": 3, **self.fit}
        given["callbacks"] = [watching, *given.get("callbacks", [])]
        history = model.fit(x, y, batch_size=self.batch, verbose=0, **given)
        scores = model.evaluate(x, y, batch_size=self.batch, verbose=0)
        variables = [v for v in model.variables if "seed" not in v.path]
        values = [keras.ops.convert_to_numpy(v.value) for v in variables]
        outputs = model.predict(x, batch_size=self.batch, verbose=0)
        return {"logs": [history.history, lines, scores], "values": [values, outputs]}


P = Program
PROGRAMS = {
    "uneven last batches": P(),
    "fewer rows than ranks": P(rows=1, batch=4),
    "built by the first batch": P(lazy),
    "subclassed": P(Subclassed),
    "a step of one's own": P(OwnStep),
    "batch normalisation": P(normalised),
    "batch normalisation, a row": P(normalised, rows=25),
    "convolutions": P(convolutional),
    "activities": P(regularized),
    "several outputs": P(several, compile=two_losses),
    "metrics": P(compile=many_metrics),
    "accumulation": P(optimizer={"gradient_accumulation_steps": 2}),
    "clipping": P(optimizer={"global_clipnorm": 0.5}),
    "averages": P(optimizer={"use_ema": True, "ema_momentum": 0.5}),
    "scaled losses": P(compile={"dynamic": True}),
    "eagerly": P(compile={"run_eagerly": True}),
    "class weights": P(fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
    "class weights, a split": P(
        fit={
            "class_weight": {0: 1.0, 1: 2.0, 2: 0.5},
            "validation_data": None,
            "validation_split": 0.25,
        }
    ),
    "weights": P(fit={"sample_weight": WEIGHT}),
    "weights, a split": P(
        several,
        compile=two_losses,
        fit={
            "sample_weight": WEIGHT,
            "validation_data": None,
            "validation_split": 0.25,
        },
    ),
    "few steps": P(fit={"steps_per_epoch": 2}),
    "several steps at once": P(compile={"steps_per_execution": 2}),
    "callbacks": P(
        fit={
            "callbacks": [
                keras.callbacks.EarlyStopping("val_loss", 0.02, 1),
                keras.callbacks.ReduceLROnPlateau("val_loss", 0.5, 1),
                keras.callbacks.TerminateOnNaN(),
            ]
        }
    ),
}
if IS_TORCH:
    del PROGRAMS["several steps at once"]  # which Keras refuses
if not compat.weighs_activity():
    del PROGRAMS["activities"]  # refused for old versions
# JAX compiles each for a while; these show what differs there
OF_JAX = {
    *("fewer rows than ranks", "batch normalisation, a row", "averages"),
    *("scaled losses", "class weights, a split", "several steps at once"),
    "several outputs",
}


SLOW = () if IS_TORCH else (pytest.mark.slow,)
NAMES = [pytest.param(n, marks=() if n in OF_JAX else SLOW) for n in PROGRAMS]


@pytest.mark.comm
@pytest.mark.parametrize("name", NAMES)
def test_a_program(comm, distribute, name):
    expected = PROGRAMS[name].train(lambda model: model)
    found = PROGRAMS[name].train(distribute)
    require_close(found["logs"], expected["logs"], 1e-5)
    require_close(found["values"], expected["values"], 1e-4)
    everyone = comm.allgather([a.tobytes() for a in leaves(found)])
    assert all(one == everyone[0] for one in everyone)


def leaves(nest):
    return list(map(np.asarray, tree.flatten(nest)))


def require_close(found, expected, tolerance):
    tree.assert_same_structure(found, expected)
    for a, b in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, tolerance, tolerance)
