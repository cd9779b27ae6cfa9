"""Arrays of other libraries go in without a copy and come back as they came."""


import numpy as np
import pytest


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


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
