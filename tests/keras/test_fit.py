"""Datasets, predictions, single batches, dropout, and what callbacks write."""

import numpy as np
import pytest

keras = pytest.importorskip("keras")
from keras import layers  # noqa: E402

import mpidist  # noqa: E402
import mpidist.keras  # noqa: E402

pytestmark = pytest.mark.comm
X = np.random.default_rng(1).normal(size=(23, 4)).astype("f4")
Y = X.sum(1, keepdims=True)


def make(*more):
    model = keras.Sequential([layers.Input((4,)), *more, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def weights(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


def test_a_dataset_is_as_the_arrays(distribute):
    plain, model = make(), distribute(make())
    model.set_weights(plain.get_weights())
    rows = mpidist.Dataset.from_tensor_slices((X, Y)).batch(5)
    expected = plain.fit(X, Y, 5, 2, 0, validation_data=(X, Y), shuffle=False)
    found = model.fit(rows, epochs=2, verbose=0, validation_data=rows)
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, 1e-5)
    np.testing.assert_allclose(weights(model), weights(plain), 1e-4)
    inputs = mpidist.Dataset.from_tensor_slices(X).batch(5)
    np.testing.assert_allclose(model.predict(inputs, verbose=0), plain.predict(X), 1e-4)


def test_a_dataset_of_unknown_length(distribute):
    rows = mpidist.Dataset.from_generator(lambda: zip(X, Y)).batch(5)
    model = distribute(make())
    with pytest.warns(UserWarning, match="ran out of data"):  # as in Keras
        history = model.fit(rows, epochs=2, verbose=0)
    assert len(history.history["loss"]) == 2


def test_a_shuffled_order_is_that_of_any_number_of_ranks(comm, distribute):
    alone = mpidist.MirroredStrategy(["CPU:0"], communicator=comm.Split(comm.rank))
    models = [make(), distribute(make())]
    models[1].set_weights(models[0].get_weights())
    mpidist.keras.distribute(models[0], alone)
    losses = [m.fit(X, Y, 5, 3, verbose=0).history["loss"] for m in models]
    np.testing.assert_allclose(*losses, 1e-5)
    alone.experimental_finalize()


def test_single_batches(distribute):
    plain, model = make(), distribute(make())
    model.set_weights(plain.get_weights())
    for count in (7, 1):
        expected = plain.train_on_batch(X[:count], Y[:count])
        np.testing.assert_allclose(
            model.train_on_batch(X[:count], Y[:count]), expected, 1e-5
        )
    np.testing.assert_allclose(
        model.test_on_batch(X, Y), plain.test_on_batch(X, Y), 1e-5
    )
    np.testing.assert_allclose(
        model.predict_on_batch(X), plain.predict_on_batch(X), 1e-4
    )


def test_predictions_of_a_model_that_was_never_built(comm, distribute):
    keras.utils.set_random_seed(comm.rank)
    found = distribute(keras.Sequential([layers.Dense(2)])).predict(X, 4, verbose=0)
    assert found.shape == (23, 2)
    assert len({array.tobytes() for array in comm.allgather(found)}) == 1


def test_ranks_draw_unlike_numbers_and_the_same_again(comm, distribute):
    def train():
        keras.utils.set_random_seed(5)
        model = distribute(make(layers.GaussianNoise(1.0), layers.Dropout(0.5)))
        seen = []
        model.layers[0].register = seen
        model.fit(X, Y, 6, 2, 0)
        return weights(model), [
            int(keras.ops.convert_to_numpy(v.value)[0])
            for v in model.variables
            if "seed" in v.path
        ]

    (first, seeds), (again, _) = train(), train()
    np.testing.assert_array_equal(first, again)
    assert len({tuple(s) for s in comm.allgather(seeds)}) == comm.size


def test_rank_0_writes_and_shows(comm, distribute, mpi_tmp_path, capsys):
    paths = [mpi_tmp_path / "best.keras", mpi_tmp_path / "log.csv"]
    checkpoint = keras.callbacks.ModelCheckpoint(paths[0], "loss", save_best_only=True)
    log = keras.callbacks.CSVLogger(paths[1])
    model = distribute(make())
    model.fit(X, Y, callbacks=[checkpoint, log], verbose=2)
    assert ("loss" in capsys.readouterr().out) == (comm.rank == 0)
    comm.Barrier()
    saved = keras.models.load_model(paths[0])  # a plain model
    np.testing.assert_allclose(saved.predict(X, verbose=0), model.predict(X), 1e-4)
    assert len(paths[1].read_text().splitlines()) == 2


def test_a_normalisation_of_two_models(distribute):
    norm = layers.BatchNormalization(momentum=0.5)
    for model in (make(norm), make(norm)):
        distribute(model).fit(X, Y, len(X), verbose=0)
    means = keras.ops.convert_to_numpy(norm.moving_mean.value)
    np.testing.assert_allclose(means, 0.75 * X.mean(0), 1e-4)


def test_a_callback_may_predict(distribute):
    model, shapes = distribute(make()), []
    watching = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: shapes.append(model.predict(X, 3, 0).shape)
    )
    model.fit(X, Y, epochs=2, callbacks=[watching], verbose=0)
    assert shapes == [(23, 1)] * 2


class Stop(keras.callbacks.Callback):
    """Ends `fit` by an error after some batches."""

    def __init__(self, batches):
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise KeyError("stopped")


@pytest.mark.parametrize(("batches", "more"), [(8, {}), (7, {"steps_per_epoch": 4})])
def test_resumed_in_the_middle_of_an_epoch(distribute, mpi_tmp_path, batches, more):
    """Weights and history are those of a job that nothing has interrupted."""

    def fit(folder, *callbacks):
        keras.utils.set_random_seed(3)
        model = make(layers.Dense(4), layers.BatchNormalization())
        resume = mpidist.keras.Resume(mpi_tmp_path / folder, every=2)
        data = mpidist.Dataset.from_tensor_slices((X, Y)).shuffle(seed=1).batch(4)
        data = data.repeat() if more else data
        given = {"callbacks": [resume, *callbacks], "verbose": 0, **more}
        history = distribute(model).fit(data, epochs=3, **given)
        return weights(model), history.history["loss"]

    expected, losses = fit("whole")
    with pytest.raises(KeyError, match="stopped"):
        fit("parts", Stop(batches))
    found, last = fit("parts")
    np.testing.assert_allclose(found, expected, 1e-6)
    np.testing.assert_allclose(last, losses[-len(last) :], 1e-6)
    assert len(last) == 2


def test_data_parallel_of_pytorch_names_the_moments(comm, strategy, caplog):
    if keras.config.backend() != "torch":
        pytest.skip("a model of PyTorch")
    from mpidist.torch import DistributedDataParallel

    caplog.set_level("INFO", "mpidist.torch")
    model = make(layers.BatchNormalization())
    DistributedDataParallel(model, strategy)(X, training=True)
    said = [r.getMessage() for r in caplog.records if "changes" in r.getMessage()]
    assert len(said) == (comm.size > 1)
    assert all("moving_mean" in text for text in said)
