"""Random models of Keras on all ranks against Keras in one process.

Each step makes a model of random layers, losses, metrics, weights and optimizers, and
trains it for some epochs of random rows, in batches of which ranks may have none. What
it returns and where weights end are those of plain Keras, which each rank computes by
itself. Some steps fail on one rank: all raise, and later steps are exact.
"""

import os
import random

os.environ.setdefault("KERAS_BACKEND", "torch")  # before Keras

import keras
import numpy as np
from keras import layers, ops, tree

import mpidist
import mpidist.keras
from mpidist.keras import compat

IS_TORCH = keras.config.backend() == "torch"
FEATURES, CLASSES = 6, 3
LOGS, VALUES = 2e-5, 2e-3  # tolerances
# Layers of a hidden part that takes and gives (rows, width)
HIDDEN = {
    "dense": lambda d: [layers.Dense(d.choice([1, 5, 8]), d.choice(["relu", "tanh"]))],
    "l2": lambda d: [layers.Dense(4, kernel_regularizer="l2", use_bias=False)],
    "norm": lambda d: [
        layers.BatchNormalization(
            momentum=d.choice([0.5, 0.9]), scale=d.choice([True, False])
        )
    ],
    "layer norm": lambda d: [layers.LayerNormalization()],
    "frozen": lambda d: [layers.Dense(5, trainable=False)],
    "frozen norm": lambda d: [layers.BatchNormalization(trainable=False)],
    "no dropout": lambda d: [layers.Dropout(0.0)],
    "unit norm": lambda d: [layers.Dense(4, kernel_constraint="unit_norm")],
    "activity": lambda d: [layers.Dense(4, "tanh", activity_regularizer="l2")],
    "convolution": lambda d: [
        layers.Reshape((-1, 1)),
        layers.Conv1D(3, 3, padding="same"),
        *([layers.BatchNormalization()] if d.random() < 0.5 else []),
        layers.ReLU(),
        d.choice([layers.Flatten, layers.GlobalAveragePooling1D])(),
    ],
    "recurrent": lambda d: [layers.Reshape((-1, 1)), layers.SimpleRNN(4)],
}
OPTIMIZERS = {
    "SGD": {"learning_rate": 0.02, "momentum": 0.9},
    "Adam": {"learning_rate": 0.01, "epsilon": 0.1},  # little is amplified
    "RMSprop": {"learning_rate": 0.01, "epsilon": 0.1},
    "Adagrad": {"learning_rate": 0.02, "epsilon": 0.1},
}
MORE = [
    {},
    {},
    {},
    {"clipnorm": 0.5},
    {"clipvalue": 0.05},
    {"global_clipnorm": 0.5},
    {"weight_decay": 0.01},
    {"use_ema": True, "ema_momentum": 0.5},
    {"gradient_accumulation_steps": 2},
]
# Of an output: its width, targets, losses and metrics
TARGETS = {
    "classes": (
        CLASSES,
        [lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)],
        ["accuracy", lambda: keras.metrics.SparseTopKCategoricalAccuracy(2)],
    ),
    "one of": (
        CLASSES,
        [
            lambda: keras.losses.CategoricalCrossentropy(
                from_logits=True, label_smoothing=0.1
            ),
            lambda: keras.losses.CategoricalFocalCrossentropy(from_logits=True),
        ],
        ["accuracy", lambda: keras.metrics.CategoricalCrossentropy(from_logits=True)],
    ),
    "numbers": (
        1,
        ["mse", "mae", "huber", "log_cosh"],
        ["mae", "mse", lambda: keras.metrics.RootMeanSquaredError(), "r2_score"],
    ),
    "binary": (
        1,
        [lambda: keras.losses.BinaryCrossentropy(from_logits=True)],
        [
            lambda: keras.metrics.BinaryAccuracy(threshold=0.0),
            lambda: keras.metrics.AUC(from_logits=True, num_thresholds=20),
            lambda: keras.metrics.Precision(thresholds=0.0),
            lambda: keras.metrics.Recall(thresholds=0.0),
        ],
    ),
}


def targets(kind, x):
    """Return what an output is to be for some rows."""
    classes = (np.abs(x.sum(1)) * 1.5).astype("i8") % CLASSES
    return {
        "classes": classes,
        "one of": np.eye(CLASSES, dtype="f4")[classes],
        "numbers": x[:, :2].sum(1, keepdims=True),
        "binary": (x.sum(1, keepdims=True) > 0).astype("f4"),
    }[kind]


def draw(random):
    """Draw steps: what to do, and a seed."""
    kinds = ["fit", "fit", "fit", "fit", "batches", "fail"]
    return [
        [random.choice(kinds), random.getrandbits(30)]
        for _ in range(random.randrange(1, 4))
    ]


class Stop(Exception):
    """An error of one rank."""


class Program:
    """A model and its data; `train` gives the same each time, on any number of ranks.

    Args:
      seed: of all that is drawn.
    """

    def __init__(self, seed):
        self.seed, self.said = seed, {}
        draw = self.draw(0)
        self.rows = draw.choice([1, 2, 5, 17, 30, 43])
        self.batch = draw.choice([1, 2, 4, 7, 16, 64])
        if self.rows / self.batch > 12:
            self.batch = 7
        self.outputs = [
            draw.choice(sorted(TARGETS)) for _ in range(draw.choice([1] * 3 + [2]))
        ]
        self.inputs = draw.choice([1, 1, 2])
        random_rows = np.random.default_rng(seed)
        self.x = random_rows.normal(size=(self.rows, FEATURES)).astype("f4")
        self.weight = random_rows.uniform(0, 2, self.rows).astype("f4")
        self.weight[random_rows.random(self.rows) < 0.2] = 0
        self.kind = draw.choice(["functional", "functional", "sequential", "lazy"])
        if len(self.outputs) + self.inputs > 2:
            self.kind = "functional"

    def draw(self, number):
        """Return a source of numbers, which is the same each time."""
        return random.Random(f"{self.seed} {number}")

    def hidden(self):
        draw, found, names = self.draw(1), [], []
        for _ in range(draw.randrange(3)):
            names.append(draw.choice(sorted(HIDDEN)))
            if names[-1] == "activity" and not compat.weighs_activity():
                names[-1] = "dense"
            found += HIDDEN[names[-1]](draw)
        self.said["layers"] = self.kind, names
        return found

    def model(self):
        """Return a compiled model."""
        draw = self.draw(2)
        widths = [TARGETS[kind][0] for kind in self.outputs]
        if self.kind != "functional":
            first = [layers.Input((FEATURES,))] if self.kind == "sequential" else []
            model = keras.Sequential([*first, *self.hidden(), layers.Dense(widths[0])])
        else:
            inputs = {
                f"i{k}": layers.Input((FEATURES,), name=f"i{k}")
                for k in range(self.inputs)
            }
            inputs = inputs["i0"] if self.inputs == 1 else inputs
            x = (
                layers.Concatenate()(tree.flatten(inputs))
                if self.inputs > 1
                else inputs
            )
            x = layers.Dense(6, "tanh")(x)
            for layer in self.hidden():
                x = layer(x)
            outputs = {
                f"o{k}": layers.Dense(w, name=f"o{k}")(x) for k, w in enumerate(widths)
            }
            model = keras.Model(inputs, self.nested(outputs))
        name = draw.choice(sorted(OPTIMIZERS))
        more = draw.choice(MORE)
        if not IS_TORCH and self.kind == "lazy" and "use_ema" in more:
            more = {}  # plain Keras loses the weights
        optimizer = getattr(keras.optimizers, name)(**OPTIMIZERS[name] | more)
        if draw.random() < 0.15:
            optimizer = keras.optimizers.LossScaleOptimizer(
                optimizer, initial_scale=8.0
            )
        losses, metrics, weighted = {}, {}, {}
        for k, kind in enumerate(self.outputs):
            _, choices, scores = TARGETS[kind]
            losses[f"o{k}"] = made(draw.choice(choices))
            for into in (metrics, weighted):
                few = draw.sample(scores, draw.randrange(len(scores)))
                into[f"o{k}"] = [made(score) for score in few]
        options = {"run_eagerly": draw.random() < 0.15 or (IS_TORCH and None)}
        if not IS_TORCH:
            options["steps_per_execution"] = draw.choice([1, 1, 2, 3])
            options["jit_compile"] = draw.choice(["auto", True])
            if options["run_eagerly"]:
                options = {"run_eagerly": True}
        if len(self.outputs) > 1 and draw.random() < 0.5:
            options["loss_weights"] = {"o0": 0.5, "o1": 1.5}
        self.said["compile"] = name, more, losses, metrics, weighted, options
        metrics, weighted = map(self.nested, (metrics, weighted))
        model.compile(
            optimizer,
            self.nested(losses),
            metrics=metrics,
            weighted_metrics=weighted,
            **options,
        )
        return model

    def nested(self, outputs):
        return outputs if len(self.outputs) > 1 else outputs["o0"]

    def data(self):
        """Return x, y and what else fit is given."""
        draw = self.draw(3)
        x = {f"i{k}": self.x * (1 + k) for k in range(self.inputs)}
        x = x if self.inputs > 1 else self.x
        y = self.nested(
            {f"o{k}": targets(kind, self.x) for k, kind in enumerate(self.outputs)}
        )
        given = {"epochs": draw.choice([1, 2, 3]), "shuffle": False}
        of_two = len(self.outputs) > 1
        if draw.random() < 0.3:
            given["sample_weight"] = self.weight
        elif (
            not of_two
            and self.outputs[0] in ("classes", "one of")
            and draw.random() < 0.3
        ):
            given["class_weight"] = {0: 1.0, 1: 2.0, 2: 0.5}
        if draw.random() < 0.3 and self.rows > 4:
            given["validation_split"] = draw.choice([0.2, 0.5])
        elif draw.random() < 0.4:
            part = draw.choice([1, 3, 11])
            few = tree.map_structure(lambda rows: rows[:part], (x, y))
            if draw.random() < 0.4:
                few = (*few, self.weight[:part] + 0.5)
            given["validation_data"] = few
            if draw.random() < 0.3:
                given["validation_batch_size"] = draw.choice([1, 2])
        if draw.random() < 0.15:
            given["steps_per_epoch"] = 1
        if draw.random() < 0.2:
            given["initial_epoch"] = 1
        return x, y, given

    def describe(self):
        given = self.data()[2]
        self.model()
        small = {
            k: v for k, v in given.items() if not isinstance(v, np.ndarray | tuple)
        }
        return (
            f"rows {self.rows}, batch {self.batch}, {self.inputs} -> {self.outputs}, "
            f"{self.said}, {small} {sorted(given)}"
        )

    def train(self, distribute, *callbacks):
        """Return all that a program computes: logs, and values."""
        keras.utils.clear_session()  # names of metrics have numbers
        keras.utils.set_random_seed(self.seed % 1000)
        model, (x, y, given) = self.model(), self.data()
        distribute(model)
        lines = []
        watching = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: lines.append(dict(logs))
        )
        given["callbacks"] = [watching, *callbacks]
        history = model.fit(x, y, batch_size=self.batch, verbose=0, **given)
        scores = model.evaluate(
            x, y, batch_size=self.batch, verbose=0, return_dict=True
        )
        return self.found(model, x, [history.history, lines, scores])

    def train_on_batches(self, distribute):
        """Return the same by calls for single batches."""
        keras.utils.clear_session()  # names of metrics have numbers
        keras.utils.set_random_seed(self.seed % 1000)
        model, (x, y, given) = self.model(), self.data()
        distribute(model)
        weight, logs = given.get("sample_weight"), []
        classes = given.get("class_weight")
        for start in range(0, min(self.rows, 4 * self.batch), self.batch):
            part = slice(start, start + self.batch)
            few = tree.map_structure(lambda rows, part=part: rows[part], (x, y))
            few = (*few, weight if weight is None else weight[part])
            logs.append(
                model.train_on_batch(*few, class_weight=classes, return_dict=True)
            )
            logs.append(model.test_on_batch(*few, return_dict=True))
        return self.found(model, x, logs)

    def found(self, model, x, logs):
        values = [
            ops.convert_to_numpy(v.value)
            for v in [*model.variables, *model.optimizer.variables]
            if "seed" not in v.path
        ]
        outputs = model.predict(x, batch_size=self.batch, verbose=0)
        return {"logs": logs, "values": [values, outputs]}


def made(what):
    return what() if callable(what) else what


class Play:
    """One step, on all ranks or without the last."""

    def __init__(self, world, seed):
        self.world, self.program = world, Program(seed)
        self.random = random.Random(seed)
        self.size = max(1, world.size - (self.random.random() < 0.2))
        self.strategy, self.is_here = world.strategy(self.size), world.rank < self.size

    def distribute(self, model):
        return mpidist.keras.distribute(model, self.strategy)

    def compare(self, train):
        """Require what one process computes."""
        expected, text = train(lambda model: model), ""
        if self.is_here:
            try:
                found = train(self.distribute)
                text = differences(found, expected)
            except mpidist.UnsupportedError as error:
                text = f"refused: {error}"
        self.world.require(not text, f"{text}\n{self.program.describe()}")
        if self.is_here:
            own = [np.asarray(a).tobytes() for a in tree.flatten(found)]
            everyone = self.world.part(self.size).allgather(own)
            text = "" if all(one == everyone[0] for one in everyone) else "ranks differ"
        self.world.require(not text, f"{text}\n{self.program.describe()}")

    def fit(self):
        self.compare(self.program.train)

    def batches(self):
        self.compare(self.program.train_on_batches)

    def fail(self):
        """Let a callback fail on one rank: all raise."""
        victim = self.random.randrange(self.size)
        event = self.random.choice(
            ["on_train_batch_end", "on_epoch_end", "on_epoch_begin", "on_train_begin"]
        )

        def broken(*_, **__):
            if self.world.rank == victim:
                raise Stop(event)

        callback = keras.callbacks.LambdaCallback(**{event: broken})
        text = ""
        _, _, given = self.program.data()
        never_begins = given.get("initial_epoch", 0) >= given["epochs"]
        is_raised = event == "on_train_begin" or not never_begins
        if self.is_here:
            try:
                self.program.train(self.distribute, callback)
                text = "no error" if is_raised else ""
            except Stop:
                text = "" if is_raised else "an error"
        self.world.require(not text, f"{text} {event}\n{self.program.describe()}")


def differences(found, expected):
    """Return in what results differ, or nothing."""
    for name, tolerance in (("logs", LOGS), ("values", VALUES)):
        try:
            tree.assert_same_structure(found[name], expected[name])
        except ValueError as error:
            return f"{name}: {error}"
        pairs = zip(
            tree.flatten(found[name]), tree.flatten(expected[name]), strict=True
        )
        for a, b in pairs:
            if np.shape(a) != np.shape(b):
                return f"{name}: {np.shape(a)}, not {np.shape(b)}"
            scale = tolerance * (1 + np.max(np.abs(b), initial=0))
            if not np.allclose(a, b, tolerance, scale, equal_nan=True):
                return f"{name}: {found[name]!r:.1500}\n not {expected[name]!r:.1500}"
    return ""


def play(world, steps):
    """Play a program."""
    if IS_TORCH:
        import torch

        torch.set_num_threads(1)
    for name, seed in steps:
        getattr(Play(world, seed), name)()
