"""What cannot be right is refused by name; an error of one rank is raised on all."""

import numpy as np
import pytest
from all_ranks import require_usable

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

import mpidist  # noqa: E402
import mpidist.keras  # noqa: E402

pytestmark = pytest.mark.comm
X = np.arange(24, dtype="f4").reshape(8, 3) / 24
Y = X.sum(1, keepdims=True)


def make(*more, loss="mse", metrics=None):
    model = keras.Sequential([layers.Input((3,)), *more, layers.Dense(1)])
    model.compile("sgd", loss, metrics=metrics)
    return model


class Largest(keras.metrics.Metric):
    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.found = self.add_weight(initializer="zeros", name="found")

    def update_state(self, y, outputs, sample_weight=None):
        self.found.assign(keras.ops.maximum(self.found, keras.ops.max(outputs)))

    def result(self):  # not a number, which JAX would refuse
        is_torch = keras.config.backend() == "torch"
        return self.found if is_torch else self.found.value


REFUSED = {
    "reduction='sum'": lambda: make(loss=keras.losses.MeanSquaredError("sum")),
    "reduction='mean_with": lambda: make(
        loss=keras.losses.MeanSquaredError("mean_with_sample_weight")
    ),
    "ignore_class": lambda: make(
        loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0)
    ),
    "no mean over rows": lambda: make(
        loss=lambda y, outputs: keras.ops.sum((y - outputs) ** 2)
    ),
    "no mean over rows: ": lambda: make(loss="dice"),
    "largest.*additive = True": lambda: make(metrics=[Largest()]),
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused_before_training(strategy, distribute, text):
    model = distribute(REFUSED[text]())
    with pytest.raises(mpidist.UnsupportedError, match=text):
        model.fit(X, Y, verbose=0)
    require_usable(strategy)


def test_a_metric_may_say_that_its_state_is_a_sum(distribute):
    class Count(Largest):
        additive = True

        def update_state(self, y, outputs, sample_weight=None):
            self.found.assign_add(keras.ops.cast(keras.ops.shape(y)[0], "float32"))

    history = distribute(make(metrics=[Count("rows")])).fit(X, Y, verbose=0)
    assert history.history["rows"] == [8]


def test_masked_outputs_are_refused(distribute):
    model = keras.Sequential([layers.Input((3, 1)), layers.Masking(), layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(mpidist.UnsupportedError, match="mask"):
        distribute(model).fit(X[..., None], X[..., None], verbose=0)


def test_callbacks_that_are_refused(distribute, tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path)
    with pytest.raises(mpidist.UnsupportedError, match=r"mpidist\.keras\.Resume"):
        distribute(make()).fit(X, Y, callbacks=[backup], verbose=0)


@pytest.mark.parametrize("data", [iter([(X, Y)]), [X.tolist()]])
def test_data_that_cannot_be_divided(strategy, distribute, data):
    with pytest.raises(mpidist.ArgumentTypeError, match=r"mpidist\.Dataset"):
        distribute(make()).fit(data, verbose=0)
    require_usable(strategy)


def test_arguments_of_distribute(strategy):
    with pytest.raises(mpidist.ArgumentTypeError, match=r"keras\.Model"):
        mpidist.keras.distribute(layers.Dense(1), strategy)
    with pytest.raises(mpidist.ArgumentTypeError, match="strategy"):
        mpidist.keras.distribute(make(), 2)


def test_arrays_must_be_equal(comm, strategy, distribute):
    if comm.size > 1:
        with pytest.raises(mpidist.MismatchError):
            distribute(make()).fit(X + comm.rank, Y, verbose=0)
        require_usable(strategy)


def test_weights_of_rank_0_are_copied_and_later_changes_are_named(comm, distribute):
    keras.utils.set_random_seed(comm.rank)
    model = distribute(make())
    model.fit(X, Y, verbose=0)
    (kernel, bias) = model.get_weights()
    assert len({array.tobytes() for array in comm.allgather(kernel)}) == 1
    if comm.size > 1:
        model.set_weights([kernel, bias + comm.rank])
        with pytest.raises(mpidist.MismatchError, match="bias"):
            model.evaluate(X, Y, verbose=0)


class Broken(layers.Layer):
    """Raises on the last rank, when it is told to."""

    is_broken = False

    def call(self, x):
        if self.is_broken:
            raise RuntimeError("broken layer")
        return x


class OwnState(layers.Layer):
    """Keeps a mean of this rank's rows."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.mean.assign(keras.ops.mean(x))
        return x


def test_a_state_of_one_ranks_rows_is_named(comm, strategy, distribute):
    if comm.size > 1:
        with pytest.raises(mpidist.MismatchError, match=r"after epoch 0.*state"):
            distribute(make(OwnState())).fit(X, Y, verbose=0)
        require_usable(strategy)


def fail(rank, count=1):
    """A function that raises on a rank when it is called for the n-th time."""
    calls = []

    def call(*_, **__):
        calls.append(0)
        if rank and len(calls) == count:
            raise RuntimeError("broken callback")

    return call


@pytest.mark.parametrize("event", ["on_train_batch_end", "on_epoch_end"])
def test_an_error_in_a_callback_of_one_rank(comm, strategy, distribute, event):
    is_last = comm.rank == comm.size - 1
    callback = keras.callbacks.LambdaCallback(**{event: fail(is_last, 2)})
    model = distribute(make())
    with pytest.raises(RuntimeError, match="broken callback"):
        model.fit(X, Y, 2, epochs=3, callbacks=[callback], verbose=0)
    require_usable(strategy)
    if keras.config.backend() == "torch":
        model.fit(X, Y, verbose=0)
    elif comm.size > 1 and event == "on_train_batch_end":  # in a step of other ranks
        with pytest.raises(mpidist.ContextError, match="make the model again"):
            model.fit(X, Y, verbose=0)


def test_an_error_in_a_layer_of_one_rank(comm, strategy, distribute):
    layer = Broken()
    model = distribute(make(layer))
    model.fit(X, Y, 2, verbose=0)
    layer.is_broken = comm.rank == comm.size - 1
    model.compile("sgd", "mse", run_eagerly=True)
    for use in (lambda: model.fit(X, Y, 2, verbose=0), lambda: model.predict(X)):
        with pytest.raises(RuntimeError, match="broken layer"):
            use()
        require_usable(strategy)


def test_an_error_in_a_generator_of_one_rank(comm, strategy, distribute):
    raising = fail(comm.rank == comm.size - 1, 4)

    def rows():
        for pair in zip(X, Y):
            raising()
            yield pair

    data = mpidist.Dataset.from_generator(rows).batch(2)
    with pytest.raises(RuntimeError, match="broken"):
        distribute(make()).fit(data, verbose=0)
    require_usable(strategy)


def test_a_rank_that_goes_another_way(comm, distribute):
    model = distribute(make())
    if comm.size > 1:
        with pytest.raises(mpidist.DivergenceError):
            (model.fit if comm.rank else model.evaluate)(X, Y, verbose=0)


def test_a_rank_that_stops_alone(comm, strategy, distribute):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = comm.rank == 1

    model = distribute(make())
    # On JAX a step has the same call for gradients as for metrics, of other arrays
    differ = mpidist.DivergenceError, mpidist.MismatchError
    if comm.size > 1:
        with pytest.raises(differ):
            model.fit(X, Y, 2, callbacks=[Stop()], verbose=0)
        require_usable(strategy)
