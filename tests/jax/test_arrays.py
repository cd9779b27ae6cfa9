"""What takes arrays takes JAX's, and gives JAX's back."""

import types

import numpy as np
import pytest

import mpidist
from mpidist.errors import ArgumentTypeError, DTypeError

jax = pytest.importorskip("jax")
jnp = jax.numpy

DTYPES = ["float32", "float16", "bfloat16", "int32", "int8", "uint8", "complex64"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5), (0, 4), (40_000,)])
def test_reductions_of_all_dtypes(comm, strategy, dtype, shape):
    size, rank = comm.size, comm.rank
    total = strategy.reduce("SUM", jnp.full(shape, rank + 1, dtype))
    assert isinstance(total, jax.Array)
    assert (total.dtype, total.shape) == (jnp.dtype(dtype), shape)
    np.testing.assert_array_equal(total, np.full(shape, size * (size + 1) // 2, dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, "bool", "float8_e4m3fn"])
def test_gathering_all_dtypes(comm, strategy, dtype):
    rows = jnp.ones((comm.rank + 1, 2), dtype)
    got = strategy.gather(rows, axis=0)
    assert isinstance(got, jax.Array)
    assert got.dtype == rows.dtype
    assert got.shape == (comm.size * (comm.size + 1) // 2, 2)
    np.testing.assert_array_equal(got, np.ones(got.shape, rows.dtype))


def test_pytrees_and_other_reductions(comm, strategy):
    value = {"a": jnp.arange(3.0), "b": [jnp.int32(comm.rank), (jnp.ones((2, 2)),)]}
    most = strategy.reduce("MAX", value)
    assert jax.tree.structure(most) == jax.tree.structure(value)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(most))
    assert int(most["b"][0]) == comm.size - 1
    mean = strategy.reduce("MEAN", value)
    assert float(mean["b"][0]) == (comm.size - 1) / 2
    rows = jnp.full((comm.rank + 1, 2), 1.0 + comm.rank)
    weights = np.arange(1, comm.size + 1)
    expected = np.full(2, (weights**2).sum() / weights.sum(), "float32")
    np.testing.assert_allclose(strategy.reduce("MEAN", rows, axis=0), expected)


def test_weak_types_and_64_bits(comm, strategy, enable_x64):
    weak = jnp.asarray(2.0)
    total = strategy.reduce("SUM", weak)
    assert total.dtype == weak.dtype
    with enable_x64(True):
        wide = jnp.full(3, 1 / 3)
        assert wide.dtype == np.float64
        total = strategy.reduce("SUM", wide)
        assert total.dtype == np.float64
        np.testing.assert_allclose(total, np.full(3, comm.size / 3), rtol=1e-15)
        large = strategy.reduce("MAX", jnp.asarray(2**40 + comm.rank))
        assert int(large) == 2**40 + comm.size - 1


def test_results_stay_as_they_are(comm, strategy):
    """They are immutable, so their memory must not be used again while they live."""
    kept = []
    for i in range(12):
        value = jnp.full(300_000, float(i + comm.rank))
        kept.append((i, value, strategy.reduce("SUM", value)))
    for i, value, total in kept:
        assert np.all(np.asarray(value) == i + comm.rank)
        expected = comm.size * i + comm.size * (comm.size - 1) // 2
        assert np.all(np.asarray(total) == expected)


def test_buckets_give_jax_arrays_that_stay_as_they_are(comm, strategy):
    like = {"w": jnp.ones(50_000), "half": jnp.ones(3, "bfloat16")}
    buckets, kept = strategy.gradient_buckets(like, "SUM"), []
    for step in range(8):
        with buckets:
            for name, leaf in like.items():
                buckets.put(name, leaf * step)
        kept.append(buckets.result)
    for step, result in enumerate(kept):
        for name, leaf in like.items():
            assert isinstance(result[name], jax.Array)
            assert result[name].dtype == leaf.dtype
            assert np.all(np.asarray(result[name], "f") == step * comm.size)


def test_symmetric_arrays_can_be_written_to(comm, strategy):
    gradients = strategy.symmetric_like(
        {"w": jnp.ones(3), "b": jnp.ones((), "bfloat16")}
    )
    gradients["w"][...] = 2
    assert strategy.reduce("SUM", gradients)["w"].tolist() == [2.0 * comm.size] * 3


def test_what_has_no_value_is_refused_by_name(comm, strategy):
    with pytest.raises(ArgumentTypeError, match="JAX is tracing it"):
        jax.jit(lambda x: strategy.reduce("SUM", x))(jnp.ones(3))
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ArgumentTypeError, match="was deleted"):
        strategy.reduce("SUM", gone)
    with pytest.raises(DTypeError, match="random keys"):
        strategy.reduce("SUM", jax.random.key(0))
    assert float(strategy.reduce("SUM", jnp.ones(()))) == comm.size


def test_variables_take_jax_arrays(comm, strategy):
    with strategy.scope():
        variable = mpidist.Variable(jnp.ones(1000, "bfloat16"))
        other = mpidist.Variable(jnp.arange(1000.0))
    copy = jnp.asarray(other)
    other.assign_add(jnp.ones(1000))
    assert float(copy[1]) == 1.0  # immutable
    assert float(jnp.asarray(other)[1]) == 2.0
    assert jnp.asarray(variable).dtype == jnp.bfloat16
    with pytest.raises(TypeError, match="Variable"):
        jnp.sin(variable)


def test_checkpoints_restore_jax_arrays(comm, strategy, mpi_tmp_path):
    def make(scale):
        return {
            "w": scale * jnp.arange(3.0),
            "half": jnp.full(2, scale, "bfloat16"),
            "tiny": jnp.full(2, scale, "float8_e5m2"),  # of NumPy's kind of floats
            "more": [jnp.int32(scale), (jnp.full((2, 2), scale, bool),)],
        }

    former = mpidist.Checkpoint(strategy=strategy, params=make(3), state=jnp.ones(()))
    mpidist.CheckpointManager(former, mpi_tmp_path, 3).save()
    later = mpidist.Checkpoint(strategy=strategy, params=make(0), state=jnp.zeros(()))
    mpidist.CheckpointManager(later, mpi_tmp_path, 3).restore_or_initialize()
    assert isinstance(later.state, jax.Array)
    for got, expected in zip(jax.tree.leaves(later.params), jax.tree.leaves(make(3))):
        assert isinstance(got, jax.Array)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["lbfgs", "adam", "sgd"])
def test_states_of_optax(strategy, mpi_tmp_path, kind):
    """An initial state has one tree of zeros in several places."""
    optax = pytest.importorskip("optax")
    optimizer = {
        "lbfgs": lambda: optax.lbfgs(0.1, memory_size=3, linesearch=None),
        "adam": lambda: optax.adam(0.1),
        "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    }[kind]()
    update_of = jax.jit(optimizer.update)
    start = {"w": jnp.array([1.0, -2.0]), "b": jnp.array(0.5)}

    def steps(params, state, n):
        for _ in range(n):
            gradient = jax.grad(lambda p: (p["w"] ** 4).sum() + p["b"] ** 2)(params)
            update, state = update_of(gradient, state, params)
            params = optax.apply_updates(params, update)
        return params, state

    def checkpoint_of(params, state):
        return mpidist.Checkpoint(strategy=strategy, params=params, state=state)

    first = steps(start, optimizer.init(start), 4)
    path = checkpoint_of(*first).save(mpi_tmp_path / "ckpt")
    later = checkpoint_of(dict(start), optimizer.init(start))
    later.restore(path)
    got, want = steps(later.params, later.state, 3), steps(*first, 3)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_arrays_of_other_libraries_in_a_root(strategy, mpi_tmp_path, library):
    make = pytest.importorskip("torch").full if library == "torch" else jnp.full

    def root(n):
        model = types.SimpleNamespace(w=make((2,), n), rows=[make((1,), n)])
        model.inner = types.SimpleNamespace(b=make((), n))
        return model

    path = mpidist.Checkpoint(root(2.0), strategy=strategy).save(mpi_tmp_path / "a")
    model = root(0.0)
    before = repr(type(model.w))
    mpidist.Checkpoint(model, strategy=strategy).restore(path)
    assert model.w.tolist() + model.rows[0].tolist() == [2, 2, 2]
    assert float(model.inner.b) == 2.0
    assert repr(type(model.w)) == before
