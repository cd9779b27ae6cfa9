"""Programs in the style of Keras' own guides, on all ranks and in one process.

Each is a function of `distribute`, whose call is the only line that differs.
"""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
from keras import layers, ops, tree  # noqa: E402

IS_TORCH = keras.config.backend() == "torch"
if not IS_TORCH:
    import jax
RANDOM = np.random.default_rng(0)


def images(count):
    """Return images of 8 by 8, and which of three stripes is bright."""
    labels = RANDOM.integers(0, 3, count)
    x = RANDOM.normal(size=(count, 8, 8, 1)).astype("f4") / 2
    for row, label in zip(x, labels):
        row[2 * label : 2 * label + 3] += 1
    return x, labels


def values(model):
    found = [v for v in model.variables if "seed" not in v.path]
    return [ops.convert_to_numpy(v.value) for v in found]


def perceptron(distribute, folder):
    """The functional API: images in, classes out, with a rate that falls."""
    (x, y), (x_test, y_test) = images(101), images(30)
    inputs = keras.Input((8, 8, 1))
    hidden = layers.Flatten()(layers.Rescaling(0.5)(inputs))
    hidden = layers.Dense(16, activation="relu")(hidden)
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 5, 0.9)
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
    )
    distribute(model)
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_split=0.2, **options)
    scores = model.evaluate(x_test, y_test, verbose=0)
    return [history.history, scores], [values(model), model.predict(x_test, verbose=0)]


def convolutions(distribute, folder, strength=0.0):
    """Image classification: augmentation, blocks with a shortcut, dropout."""
    x, y = images(45)
    inputs = keras.Input((8, 8, 1))
    first = layers.RandomContrast(strength)(
        layers.RandomTranslation(0, strength)(inputs)
    )
    hidden = layers.Conv2D(4, 3, padding="same", use_bias=False)(first)
    hidden = layers.Activation("relu")(layers.BatchNormalization(momentum=0.8)(hidden))
    shortcut = hidden
    hidden = layers.SeparableConv2D(4, 3, padding="same")(hidden)
    hidden = layers.BatchNormalization(momentum=0.8)(hidden)
    hidden = layers.MaxPooling2D(2)(layers.add([hidden, shortcut]))
    hidden = layers.GlobalAveragePooling2D()(hidden)
    outputs = layers.Dense(3)(layers.Dropout(strength)(hidden))
    model = keras.Model(inputs, outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    distribute(model)
    given = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, validation_data=(x[:7], y[:7]), **given)
    return [history.history], [values(model), model.predict(x, verbose=0)]


def text(distribute, folder):
    """Text classification: words as numbers, padded by a 0 that is masked."""
    words = RANDOM.integers(1, 20, (53, 7))
    words[np.arange(7) >= RANDOM.integers(2, 8, (53, 1))] = 0
    y = (words == 3).any(1).astype("f4")[:, None]
    inputs = keras.Input((7,), dtype="int32")
    hidden = layers.Embedding(20, 8, mask_zero=True)(inputs)
    hidden = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(hidden)
    hidden = layers.GlobalAveragePooling1D()(hidden)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(hidden))
    adam = keras.optimizers.Adam(0.01, epsilon=1e-3, clipnorm=1.0)
    scores = ["accuracy", keras.metrics.AUC(name="auc", num_thresholds=20)]
    model.compile(adam, "binary_crossentropy", metrics=scores)
    distribute(model)
    given = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(words, y, class_weight={0: 1.0, 1: 3.0}, **given)
    return [history.history], [values(model), model.predict(words, verbose=0)]


def tickets(distribute, folder):
    """Several inputs and outputs, which share a layer; each output has its weights."""
    title, body = (RANDOM.normal(size=(41, n)).astype("f4") for n in (4, 6))
    urgent = (title.sum(1) > 0).astype("f4")[:, None]
    team = (np.abs(body.sum(1)) * 1.5).astype("i8") % 3
    inputs = {
        n: keras.Input((len(a[0]),), name=n) for n, a in (("t", title), ("b", body))
    }
    shared = layers.Dense(5, activation="tanh")
    parts = [shared(layers.Dense(4)(one)) for one in inputs.values()]
    hidden = layers.concatenate(parts)
    outputs = {
        "urgent": layers.Dense(1, activation="sigmoid", name="urgent")(hidden),
        "team": layers.Dense(3, activation="softmax", name="team")(hidden),
    }
    model = keras.Model(inputs, outputs)
    model.compile(
        keras.optimizers.RMSprop(0.01, epsilon=1e-2),
        {"urgent": "binary_crossentropy", "team": "sparse_categorical_crossentropy"},
        loss_weights={"urgent": 1.0, "team": 0.2},
        metrics={"team": ["accuracy"]},
        weighted_metrics={"urgent": ["accuracy"]},
    )
    distribute(model)
    weights = {
        "urgent": np.where(urgent[:, 0] > 0, 2, 0.5).astype("f4"),
        "team": (1 + team / 2).astype("f4"),
    }
    x, y = {"t": title, "b": body}, {"urgent": urgent, "team": team}
    given = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, sample_weight=weights, **given)
    few = tree.map_structure(lambda rows: rows[:9], x)
    return [history.history], [values(model), model.predict(few, verbose=0)]


class Regression(keras.Model):
    """Has a step and a metric of its own, by the guide of each backend."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(8, "relu"), layers.Dense(1)
        self.score = keras.metrics.MeanAbsoluteError(name="score")

    def call(self, x):
        return self.last(self.first(x))

    @property
    def metrics(self):
        return [self._loss_tracker, self.score]

    if IS_TORCH:

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
            loss.backward()
            gradients = [v.value.grad for v in self.trainable_weights]
            self.optimizer.apply(gradients, self.trainable_weights)
            self._loss_tracker.update_state(loss, sample_weight=len(x))
            self.score.update_state(y, outputs)
            return {metric.name: metric.result() for metric in self.metrics}

    else:

        def loss_and_updates(self, trainable, others, x, y):
            outputs, others = self.stateless_call(trainable, others, x)
            return self.compute_loss(x, y, outputs), (outputs, others)

        def train_step(self, state, data):
            (trainable, others, moments, states), (x, y) = state, data
            both = jax.value_and_grad(self.loss_and_updates, has_aux=True)
            found, gradients = both(trainable, others, x, y)
            loss, (outputs, others) = found
            trainable, moments = self.optimizer.stateless_apply(
                moments, gradients, trainable
            )
            tracker, score = self.metrics
            of_loss = tracker.stateless_update_state(
                states[:2], loss, sample_weight=len(x)
            )
            of_score = score.stateless_update_state(states[2:], y, outputs)
            logs = {"loss": tracker.stateless_result(of_loss)}
            logs["score"] = score.stateless_result(of_score)
            return logs, (trainable, others, moments, [*of_loss, *of_score])


def own_step(distribute, folder):
    """A step of one's own, and callbacks, one of which is written here."""
    x = RANDOM.normal(size=(39, 4)).astype("f4")
    y = np.sin(x.sum(1, keepdims=True))
    model = Regression()
    model.compile(keras.optimizers.SGD(0.2, momentum=0.9), "mse")
    distribute(model)
    path, rates = f"{folder}/best.weights.h5", []
    callbacks = [
        keras.callbacks.EarlyStopping(
            "val_loss", patience=3, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, factor=0.3),
        keras.callbacks.ModelCheckpoint(
            path, "val_loss", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda *_: rates.append(float(model.optimizer.learning_rate))
        ),
    ]
    given = {"batch_size": 8, "epochs": 8, "shuffle": False, "verbose": 0}
    held_out = x[:10] + 0.3, y[:10]
    history = model.fit(x, y, validation_data=held_out, callbacks=callbacks, **given)
    with open(path, "rb") as file:  # of all ranks, as it is in a folder of all
        assert file.read(8) == b"\x89HDF\r\n\x1a\n"
    return [history.history, rates], [values(model), model.predict(x, verbose=0)]


# JAX compiles some for a while
SLOW = () if IS_TORCH else (pytest.mark.slow,)
GUIDES = [
    perceptron,
    own_step,
    *(pytest.param(guide, marks=SLOW) for guide in (convolutions, text, tickets)),
]


def run(guide, distribute, folder, **more):
    global RANDOM
    RANDOM = np.random.default_rng(1)
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)
    return guide(distribute, folder, **more)


@pytest.mark.comm
@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.__name__)
def test_a_guide(comm, distribute, mpi_tmp_path, guide):
    alone = mpi_tmp_path / f"alone-{comm.rank}"
    alone.mkdir()
    expected = run(guide, lambda model: model, alone)
    found = run(guide, distribute, mpi_tmp_path)
    for got, want, tolerance in zip(found, expected, (2e-5, 1e-3)):
        tree.assert_same_structure(got, want)
        for a, b in zip(tree.flatten(got), tree.flatten(want)):
            np.testing.assert_allclose(a, b, tolerance, tolerance)
    require_same(comm, found)


def require_same(comm, found):
    everyone = comm.allgather([np.asarray(a).tobytes() for a in tree.flatten(found)])
    assert all(one == everyone[0] for one in everyone)


@pytest.mark.comm
@pytest.mark.skipif(not IS_TORCH, reason="JAX compiles for a while")
def test_an_augmented_guide_is_reproducible(comm, distribute, mpi_tmp_path):
    first, again = (
        run(convolutions, distribute, mpi_tmp_path, strength=0.3) for _ in range(2)
    )
    require_same(comm, first)
    for a, b in zip(tree.flatten(first), tree.flatten(again), strict=True):
        np.testing.assert_array_equal(a, b)
