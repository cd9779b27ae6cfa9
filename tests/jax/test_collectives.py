"""Collectives inside of jit, grad, vmap, scan and cond; the oracle is one process."""

import functools
import threading

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import ReduceOp
from mpidist.errors import (
    ArgumentError,
    ContextError,
    DivergenceError,
    DTypeError,
    MismatchError,
    UnsupportedError,
)

jax = pytest.importorskip("jax")
mj = pytest.importorskip("mpidist.jax")
jnp = jax.numpy


@pytest.fixture
def reduce(strategy):
    """`all_reduce` over all replicas of the test's strategy."""
    return lambda op, x, **more: mj.all_reduce(op, x, strategy=strategy, **more)


def parts(comm, *shape):
    """Return what each replica has, the same arrays on all ranks."""
    random = np.random.default_rng(5)
    return [random.normal(size=shape).astype("float32") for _ in range(comm.size)]


def test_means_of_wide_integers_are_wide(comm, reduce, enable_x64):
    with enable_x64(True):
        mean = mj.jit(lambda x: reduce("MEAN", x))(jnp.full(4, comm.rank))
        assert mean.dtype == np.float64


def test_a_mean_of_integers_is_a_float(comm, reduce):
    mean = mj.jit(lambda x: reduce("MEAN", x))(jnp.full(4, comm.rank))
    assert mean.dtype == jnp.result_type(float)
    assert mean[0] == (comm.size - 1) / 2


def test_a_root_that_is_no_replica_is_refused(comm, strategy):
    n = comm.size
    with pytest.raises(ArgumentError, match=f"root must be below {n}, not {n}"):
        mj.broadcast(jnp.ones(3), n, strategy=strategy)


def test_the_order_is_that_of_the_program(comm, strategy, reduce):
    """No value of one depends on another's, and still ranks make them in one order."""

    def many(x):
        return [reduce("SUM" if i % 2 else "MAX", x[: 1 + i % 3]) for i in range(12)]

    got = mj.jit(many)(jnp.full(3, 1.0 + comm.rank))
    expected = [comm.size, comm.size * (comm.size + 1) / 2]
    assert [float(a[0]) for a in got] == [expected[i % 2] for i in range(12)]
    assert [a.size for a in got] == [1 + i % 3 for i in range(12)]
    # Calls outside of jit come where the program has them
    assert float(strategy.reduce("SUM", jnp.ones(()))) == comm.size


def test_vmap_reduces_the_batch_dimension_with_the_others(comm, strategy, reduce):
    mine = parts(comm, 4, 2)
    got = mj.jit(jax.vmap(lambda x: reduce("SUM", x * 2), in_axes=1))(mine[comm.rank])
    np.testing.assert_allclose(got, 2 * sum(mine).T, rtol=1e-5)
    got = jax.vmap(lambda x: mj.all_gather(x, 0, strategy=strategy))(mine[comm.rank])
    np.testing.assert_array_equal(got, np.concatenate(mine, 1))
    got = jax.vmap(lambda x, y: reduce("SUM", (x, y))[1], (0, None), None)(
        mine[comm.rank], 1.0
    )
    assert float(got) == comm.size


def test_scan_and_its_gradient(comm, reduce):
    factors = parts(comm, 5)

    def body(x, factor):
        x = reduce("MEAN", x * factor)
        return x, x

    def run(x, factors):
        last, all_of_them = jax.lax.scan(body, x, factors)
        return last, all_of_them

    last, steps = mj.jit(run)(2.0, factors[comm.rank])
    means = np.mean(factors, axis=0)
    np.testing.assert_allclose(steps, 2 * np.cumprod(means), rtol=1e-4)
    got = mj.jit(jax.grad(lambda x: run(x, factors[comm.rank])[0]))(2.0)
    # Of the sum of all replicas' losses, by this replica's own first value
    expected = float(last) / 2 * factors[comm.rank][0] / means[0]
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_cond_on_one_side_is_an_error_on_all_ranks(comm, strategy, reduce):
    fn = mj.jit(
        lambda x: jax.lax.cond(x > 0, lambda x: reduce("SUM", x), lambda x: x, x)
    )
    assert float(fn(1.0)) == comm.size
    assert float(fn(-1.0)) == -1
    if comm.size == 1:
        return

    def diverge():
        fn(float(comm.rank))  # all but rank 0 communicate
        strategy.barrier()

    with pytest.raises(DivergenceError, match=r"barrier at .*test_collect"):
        diverge()
    assert float(fn(1.0)) == comm.size  # the strategy is sound


@pytest.mark.parametrize("inside_run", [False, True])
def test_unlike_shapes_are_an_error_on_all_ranks(comm, strategy, reduce, inside_run):
    fn = mj.jit(lambda x: reduce("SUM", x))

    def step():
        return fn(jnp.ones(3 + comm.rank))

    if comm.size == 1:
        assert step().shape == (3,)
        return
    with pytest.raises(MismatchError, match=r"\(3,\) on rank 0"):
        strategy.run(step) if inside_run else step()
    with pytest.raises(jax.errors.JaxRuntimeError, match="MismatchError"):
        jax.jit(lambda x: reduce("SUM", x))(jnp.ones(3 + comm.rank))
    assert float(fn(jnp.ones(3))[0]) == comm.size


def test_an_error_of_one_rank_is_raised_on_all(comm, strategy, reduce):
    """Here of a sum that does not fit; it is found inside of the callback."""
    fn = mj.jit(lambda x: reduce("SUM", x))
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="does not fit"):
            fn(jnp.full(3, 100, "int8"))

    def fail_on_last():
        if comm.rank == comm.size - 1:
            raise OSError("no file")
        return fn(jnp.ones(3))

    with pytest.raises(OSError, match="no file"):
        strategy.run(fail_on_last)
    assert float(fn(jnp.ones(3))[0]) == comm.size


def test_what_cannot_work_is_refused_when_it_is_traced(comm, strategy, reduce):
    with pytest.raises(DTypeError, match="bool"):
        jax.jit(lambda x: reduce("SUM", x))(jnp.ones(3, bool))
    for call in (mj.all_gather, mj.broadcast):
        with pytest.raises(DTypeError, match=f"{call.__name__} has .*key_data"):
            jax.jit(functools.partial(call, strategy=strategy))(jax.random.key(0)[None])
    if comm.size == 1:
        return
    for op in ReduceOp:
        if not op.adds:
            with pytest.raises(UnsupportedError, match=f"{op.name} has no derivative"):
                jax.jit(jax.grad(lambda x, op=op: reduce(op, x)))(1.0)
    errors = []

    def in_a_thread():
        try:
            jax.jit(lambda x: reduce("SUM", x))(1.0)
        except ContextError as error:
            errors.append(str(error))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert "only the thread that created the strategy" in errors[0]


def test_jit_has_the_methods_of_jax(comm, strategy, reduce):
    function = mj.jit(lambda x: reduce("SUM", x))
    compiled = function.lower(jnp.ones(3)).compile()
    assert float(compiled(jnp.ones(3))[0]) == comm.size
    assert function.eval_shape(jnp.ones(3)).shape == (3,)
    assert function.trace(jnp.ones(3)).jaxpr
    function.clear_cache()


def test_without_a_strategy_it_is_the_current_one(comm, strategy):
    if comm.size > 1:
        with pytest.raises(ContextError, match="outside strategy"):
            mj.all_reduce("SUM", 1.0)
    got = strategy.run(lambda: mj.jit(lambda x: mj.all_reduce("SUM", x))(1.0))
    (got,) = strategy.experimental_local_results(got)
    assert float(got) == comm.size
    with strategy.scope():
        assert float(mj.all_reduce("SUM", jnp.ones(()))) == comm.size


@pytest.mark.mpi(min_size=2)
def test_compiled_code_is_for_the_current_strategy(comm, strategy):
    alone = mpidist.MirroredStrategy(["CPU:0"], communicator=MPI.COMM_SELF)
    total = mj.jit(lambda x: mj.all_reduce("SUM", x))
    plain = jax.jit(lambda x: mj.all_reduce("SUM", x))
    with strategy.scope():
        assert float(plain(1.0)) == comm.size
    for current, count in [(strategy, comm.size), (alone, 1)] * 2:
        with current.scope():
            assert float(total(1.0)) == count
    with alone.scope(), pytest.raises(jax.errors.JaxRuntimeError, match="Mixing"):
        plain(1.0)
    with strategy.scope():
        assert float(plain(1.0)) == comm.size
    alone.experimental_finalize()


def test_an_earlier_error_does_not_replace_anothers(comm, strategy):
    def fail(x):
        raise KeyError("ours")

    def of_user(x):
        return jax.experimental.io_callback(fail, x, x)

    bad = jax.jit(lambda x: mj.all_reduce("SUM", x, strategy=strategy))
    first = np.zeros(2 + comm.rank, "f")
    if comm.size > 1:
        with pytest.raises(jax.errors.JaxRuntimeError):
            bad(first)  # nobody takes mpidist's own error
    with pytest.raises(jax.errors.JaxRuntimeError, match="ours"):
        mj.jit(of_user)(jnp.ones(()))


SCRIPT = """
import jax
import jax.numpy as jnp
import mpidist
{before}
import mpidist.jax

strategy = mpidist.MirroredStrategy()
try:
    jax.jit(lambda x: mpidist.jax.all_reduce("SUM", x, strategy=strategy))(jnp.ones(3))
except Exception as error:
    if strategy.extended.replica_id == 0:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            "jax.config.update('jax_num_cpu_devices', 2)",
            "UnsupportedError .* 2 devices",
        ),
        ("jnp.ones(3) + 1", "ContextError .* import mpidist.jax before JAX computes"),
    ],
)
def test_devices_and_dispatch_are_checked(mpirun, before, message):
    import re

    ended = mpirun(2, SCRIPT.format(before=before))
    assert re.match(message, ended.stdout), ended.stdout + ended.stderr


CONVOLUTION = """
import jax
import jax.numpy as jnp
import mpidist
import mpidist.jax

strategy = mpidist.MirroredStrategy()
rank = strategy.extended.replica_id

def loss(w, x):
    for v in w:
        x = jax.nn.relu(jax.lax.conv_general_dilated(x, v, (1, 1), "SAME"))
    return x.mean()

step = mpidist.jax.jit(mpidist.jax.value_and_grad(loss, strategy=strategy))
w = [jnp.ones((8, 8, 3, 3)) * 0.02 for _ in range(3)]
x = jax.random.normal(jax.random.key(rank), (16, 8, 16, 16))
losses = []
for _ in range(10):
    value, gradient = step(w, x)
    w = jax.tree.map(lambda a, b: a - 0.1 * b, w, gradient)
    losses.append(float(strategy.reduce("SUM", value)))  # between computations
assert len(set(strategy.gather_objects(losses[-1]))) == 1
if rank == 0:
    print("ended", losses[-1] < losses[0])
"""


@pytest.mark.slow
def test_callbacks_in_threads_of_xla(mpirun):
    """A program with convolutions runs in XLA's threads, and so do its callbacks."""
    ended = mpirun(2, CONVOLUTION)
    assert ended.stdout == "ended True\n", ended.stderr


def test_import_mpidist_does_not_import_jax(mpirun):
    script = "import sys\nimport mpidist\nprint('jax' in sys.modules)\n"
    assert mpirun(1, script).stdout == "False\n"
    assert mpidist.__doc__
