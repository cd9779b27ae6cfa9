"""Gradients of the mean over the rows of all replicas, against JAX in one process."""

import numpy as np
import pytest

import mpidist
from mpidist.errors import ArgumentError, ArgumentTypeError

jax = pytest.importorskip("jax")
mj = pytest.importorskip("mpidist.jax")
gradients = pytest.importorskip("mpidist.jax.gradients")
jnp = jax.numpy

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(11, 3)).astype("f"), RANDOM.normal(size=11).astype("f")


def loss_of(weights, x, y):
    return jnp.mean((x @ weights["w"] + weights["b"] - y) ** 2)


def weights(dtype="float32"):
    return {"w": jnp.asarray([0.5, -1, 2], dtype), "b": jnp.ones((), dtype)}


def share(comm, first=None):
    """Return this replica's rows: all but `first` are divided over the other ranks."""
    if comm.size == 1:
        return slice(None)
    first = len(X) // comm.size if first is None else first
    cuts = [0, *np.linspace(first, len(X), comm.size).astype(int)]
    return slice(cuts[comm.rank], cuts[comm.rank + 1])


def require_close(got, expected, rtol=1e-5):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        assert isinstance(a, jax.Array)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
            np.asarray(a, "f"), np.asarray(b, "f"), rtol=rtol, atol=rtol
        )


@pytest.mark.parametrize("wrap", [lambda f: f, mj.jit])
@pytest.mark.parametrize("first", [None, 1, 0])
def test_the_mean_is_over_rows(comm, strategy, wrap, first):
    """Also where a replica has no rows, of which the mean is not a number."""
    rows = share(comm, first)
    step = wrap(mj.value_and_grad(loss_of, strategy=strategy))
    got = step(weights(), X[rows], Y[rows])
    require_close(got, jax.value_and_grad(loss_of)(weights(), X, Y))
    gradient = wrap(mj.grad(loss_of, strategy=strategy))(weights(), X[rows], Y[rows])
    require_close(gradient, got[1])


@pytest.mark.parametrize("wrap", [lambda f: f, mj.jit])
@pytest.mark.parametrize("first", [None, 0])
def test_a_loss_divided_by_the_rows_of_all_replicas(comm, strategy, wrap, first):
    def of_all(weights, x, y):
        return loss_of(weights, x, y) if len(x) == len(X) else None

    def of_part(weights, x, y):
        losses = (x @ weights["w"] + weights["b"] - y) ** 2
        return jnp.sum(losses) / len(X), len(x)

    rows, expected = share(comm, first), jax.value_and_grad(of_all)(weights(), X, Y)
    options = {"reduction": "sum", "has_aux": True, "strategy": strategy}
    step = wrap(mj.value_and_grad(of_part, **options))
    (value, count), gradient = step(weights(), X[rows], Y[rows])
    require_close((value, gradient), expected)
    assert int(count) == len(X[rows])
    gradient, _ = wrap(mj.grad(of_part, **options))(weights(), X[rows], Y[rows])
    require_close(gradient, expected[1])


def test_it_is_said_once_how_losses_are_combined(comm, strategy, caplog):
    gradients._say_how.cache_clear()
    caplog.set_level("INFO", "mpidist.jax")
    for _ in range(2):
        mj.value_and_grad(loss_of, strategy=strategy)(weights(), X, Y)
    said = [r for r in caplog.records if "reduction='sum'" in r.getMessage()]
    assert len(said) == (comm.size > 1)
    with pytest.raises(ArgumentError, match=r"reduction must be.*'total'"):
        mj.grad(loss_of, reduction="total")


def test_float16_does_not_overflow_where_the_mean_does_not(comm, strategy):
    count = 50_000  # rows
    step = mj.value_and_grad(lambda w, x: jnp.mean(w * x), strategy=strategy)
    x = jnp.full(count, 100, "float16")
    _, gradient = step(jnp.ones((), "float16"), x)
    assert float(gradient) == pytest.approx(100, rel=0.01)


def test_float16_inside_does_not_overflow(comm, strategy):
    """The loss is not multiplied by its rows before it is differentiated."""

    def loss(w, x):
        return jnp.mean((x * w.astype("float16")) ** 2).astype("float32")

    x = np.full(20_000 + comm.rank, 30, "float16")
    step = mj.jit(mj.value_and_grad(loss, strategy=strategy))
    value, gradient = step(jnp.ones(()), x)
    assert float(value) == pytest.approx(900, rel=1e-2)
    assert float(gradient) == pytest.approx(1800, rel=1e-2)


def inner(w, sums):
    """A collective in the loss, deep inside other functions."""
    scan = jax.lax.scan(lambda c, _: (sums(c), None), w, None, 1)[0]
    return jax.lax.cond(jnp.ones((), bool), jax.jit(lambda w: w + scan), sums, w)


@pytest.mark.parametrize("wrap", [lambda f: f, mj.jit])
@pytest.mark.parametrize("first", [None, 1, 0])
def test_collectives_in_the_loss_with_unequal_rows(comm, strategy, wrap, first):
    def loss(w, x, sums=lambda w: w * comm.size):
        total = inner(w, sums) / (comm.size + 1)
        return jnp.mean(jnp.tanh(x @ total) ** 2) + 0.1 * (total**2).sum()

    def of_part(w, x):
        return loss(w, x, lambda w: mj.all_reduce("SUM", w, strategy=strategy))

    w = jnp.asarray([0.5, -1.0, 2.0])
    got = wrap(mj.value_and_grad(of_part, strategy=strategy))(w, X[share(comm, first)])
    expected = jax.value_and_grad(loss)(w, X)
    require_close(got[0], expected[0], 1e-5)
    # Each replica's gradient is that of its copy: together they are the whole
    require_close(got[1], expected[1], 1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, mj.jit])
def test_numbers_of_rows_are_exact(comm, strategy, wrap, enable_x64):
    """Those that are computed, and more than float32 can count."""
    counted = wrap(lambda n: mj.mean_over_rows(n, n, strategy=strategy))
    assert float(counted(jnp.asarray(2))) == 2
    if comm.size == 2:
        rows = 2**24 + 1 - comm.rank
        with enable_x64(True):
            many = wrap(lambda v: mj.mean_over_rows(v, rows, strategy=strategy))
            assert float(many(jnp.float64(comm.rank))) == 2**24 / (2**25 + 1)


@pytest.mark.parametrize("wrap", [lambda f: f, mj.jit])
def test_second_derivatives(comm, strategy, wrap):
    rows = share(comm)
    step = mj.value_and_grad(loss_of, strategy=strategy)
    first = lambda w: step({"w": w, "b": 1.0}, X[rows], Y[rows])[1]["w"]  # noqa: E731
    whole = lambda w: jax.grad(loss_of)({"w": w, "b": 1.0}, X, Y)["w"]  # noqa: E731
    w = weights()["w"]
    hessian = jax.jacfwd(whole)(w)
    require_close(wrap(jax.jacfwd(first))(w), hessian, 1e-4)
    # In reverse mode: the derivatives of all replicas' results by this one's weights
    parts = wrap(jax.jacrev(first))(w)
    got = mj.all_reduce("MEAN", parts, strategy=strategy)
    require_close(got, hessian, 1e-4)


def test_donation(comm, strategy):
    step = mj.value_and_grad(loss_of, strategy=strategy)

    def descend(w, x, y):
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, step(w, x, y)[1])

    donating, plain = mj.jit(descend, donate_argnums=0), mj.jit(descend)
    rows = share(comm)
    a, b = weights(), weights()
    for _ in range(3):
        given, a, b = a, donating(a, X[rows], Y[rows]), plain(b, X[rows], Y[rows])
        assert given["w"].is_deleted()
    require_close(a, b, 0)


@pytest.mark.mpi(min_size=2)
def test_rows_that_cannot_be_told_are_an_error_on_all_ranks(comm, strategy):
    step = mj.value_and_grad(loss_of, strategy=strategy)
    with pytest.raises(ArgumentError, match=r"batch_argnums=\(1, 2\)"):
        step(weights(), X, Y[: len(Y) - (comm.rank == 1)])
    with pytest.raises(ArgumentError, match="the number of rows is ambiguous"):
        mj.grad(lambda w, t: w * t, strategy=strategy)(1.0, 2.0)
    with pytest.raises(ArgumentTypeError, match="batch_argnums"):
        mj.grad(loss_of, batch_argnums="x")
    with pytest.raises(ArgumentError, match="names an argument that does not exist"):
        mj.grad(lambda w: w, batch_argnums=3, strategy=strategy)(1.0)
    rows = share(comm)
    got = step(weights(), X[rows], Y[rows])
    require_close(got, jax.value_and_grad(loss_of)(weights(), X, Y))


def test_a_step_is_one_collective(comm, strategy):
    consensus = strategy.extended.consensus
    step = mj.jit(mj.value_and_grad(loss_of, strategy=strategy))
    step(weights(), X, Y)
    before = consensus.calls
    step(weights(), X, Y)
    assert consensus.calls - before == (comm.size > 1)


@pytest.mark.parametrize("compression", ["float16", "bfloat16"])
@pytest.mark.parametrize("transform", [lambda f: f, mj.jit])
def test_numbers_of_rows_are_not_compressed(comm, strategy, compression, transform):
    options = mpidist.CommunicationOptions(
        compression=compression, implementation="MPI"
    )
    rows = jnp.full(70_001 + comm.rank, 1.0 + comm.rank / 2)
    counts = np.array([70_001 + rank for rank in range(comm.size)])
    expected = np.average(1.0 + np.arange(comm.size) / 2, weights=counts)
    both = mj.value_and_grad(
        lambda w, x: jnp.mean(w * x), strategy=strategy, options=options
    )
    value, gradient = transform(lambda w, x: both(w, x))(1.0, rows)
    np.testing.assert_allclose([value, gradient], [expected] * 2, rtol=2e-2)
    mean = mj.mean_over_rows(
        jnp.float32(1), len(rows), options=options, strategy=strategy
    )
    assert abs(float(mean) - 1) < 2e-2
