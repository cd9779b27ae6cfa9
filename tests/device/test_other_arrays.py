"""Arrays of other libraries go in without a copy and come back as they came."""

import array

import numpy as np
import pytest

import mpidist
from mpidist.device import arrays


class Foreign:
    """An array of a library that speaks DLPack and nothing else."""

    def __init__(self, data):
        self.data = data

    def __dlpack__(self, **kwargs):
        return self.data.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.data.__dlpack_device__()


@pytest.mark.parametrize(
    "wrap",
    [
        Foreign,
        lambda a: memoryview(a),
        lambda a: array.array("d", a.reshape(-1)),
        lambda a: np.lib.stride_tricks.as_strided(a, writeable=False),
    ],
    ids=["dlpack", "memoryview", "array.array", "read-only"],
)
def test_buffers_of_others_are_taken_without_a_copy(strategy, wrap):
    data = np.arange(6.0)
    given = wrap(data)
    taken = arrays.to_array(given)
    if not isinstance(given, array.array):
        assert np.shares_memory(taken, data)
    got = strategy.reduce("SUM", given)
    np.testing.assert_array_equal(got, data * strategy.num_replicas_in_sync)
    np.testing.assert_array_equal(
        strategy.gather(given, 0), np.tile(data, strategy.num_replicas_in_sync)
    )


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.slow
def test_torch_tensors_come_back_as_tensors(strategy, torch):
    n = strategy.num_replicas_in_sync
    rank = strategy.extended.replica_id

    def step(x):
        context = mpidist.get_replica_context()
        assert isinstance(x, torch.Tensor)
        total = context.all_reduce("SUM", {"x": x, "scalar": x.sum()})
        return total, context.all_gather(x, axis=1)

    value = mpidist.PerReplica((torch.arange(6.0).reshape(2, 3) + rank,), (rank,))
    ((total, gathered),) = strategy.experimental_local_results(
        strategy.run(step, (value,))
    )
    everyone = [np.arange(6.0).reshape(2, 3) + r for r in range(n)]
    for got, want in [
        (total["x"], np.sum(everyone, axis=0)),
        (total["scalar"], np.sum(everyone)),
        (gathered, np.concatenate(everyone, axis=1)),
    ]:
        assert isinstance(got, torch.Tensor)
        assert got.dtype == torch.float32
        assert tuple(got.shape) == np.shape(want)
        np.testing.assert_array_equal(got.numpy(), np.asarray(want, "f4"))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "complex64"])
def test_torch_dtypes(strategy, torch, op, dtype):
    n = strategy.num_replicas_in_sync
    got = strategy.reduce(op, torch.ones(3, dtype=getattr(torch, dtype)))
    is_int_mean = (op, dtype) == ("MEAN", "int32")
    assert got.dtype == (torch.float64 if is_int_mean else getattr(torch, dtype))
    assert got.tolist() == [n if op == "SUM" else 1] * 3


def test_torch_views_and_empty_tensors(strategy, torch):
    n = strategy.num_replicas_in_sync
    base = torch.arange(12.0).reshape(3, 4)
    for value in (base.T, base[:, ::2], base[:0], torch.tensor(2.0)):
        got = strategy.reduce("SUM", value)
        assert tuple(got.shape) == tuple(value.shape)
        np.testing.assert_array_equal(got.numpy(), value.numpy() * n)
    mean = strategy.reduce("MEAN", base, axis=0)
    np.testing.assert_array_equal(np.asarray(mean), base.numpy().mean(axis=0))


def test_a_tensor_that_requires_a_gradient_is_refused_by_name(strategy, torch):
    with pytest.raises(TypeError, match=r"value\['w'\].*detach"):
        strategy.reduce("SUM", {"w": torch.ones(2, requires_grad=True), "x": 1.0})
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def test_a_variable_takes_a_tensor(strategy, torch):
    with strategy.scope():
        w = mpidist.Variable(
            torch.zeros(2), aggregation=mpidist.VariableAggregation.SUM
        )
    strategy.run(lambda: w.assign_add(torch.ones(2)))
    np.testing.assert_array_equal(w, [strategy.num_replicas_in_sync] * 2)
