"""Tensors go in and come out of what takes arrays."""

import numpy as np
import pytest

import mpidist

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_symmetric_tensors_are_reduced_where_they_lie(strategy, dtype):
    dtype = getattr(torch, dtype)
    like = {"w": torch.ones(3, 2, dtype=dtype), "b": np.zeros(2)}
    given = strategy.symmetric_like(like)
    assert isinstance(given["w"], torch.Tensor)
    assert type(given["b"]) is np.ndarray
    assert given["w"].dtype == dtype
    assert given["w"].shape == (3, 2)
    group = strategy.extended
    if group.num_replicas > 1 and dtype == torch.float32:
        assert group.symmetric_memory.place_of([given["w"].numpy()])
        assert group.symmetric_memory.place_of([given["w"][1:].numpy()])
    for step in range(3):
        given["w"].fill_(step + 1)
        given["b"][...] = step
        total = strategy.reduce("SUM", given)
        assert isinstance(total["w"], torch.Tensor)
        ranks = strategy.num_replicas_in_sync
        assert (total["w"] == ranks * (step + 1)).all()
        assert (total["b"] == ranks * step).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_buckets_of_tensors_give_tensors(strategy, dtype):
    dtype = getattr(torch, dtype)
    like = {"w": torch.zeros(1000, 30, dtype=dtype), "b": np.zeros(2)}
    buckets = strategy.gradient_buckets(like, "MEAN")
    for step in range(2):
        with buckets:
            buckets.put("b", np.full(2, 3.0))
            buckets.put("w", torch.full((1000, 30), step + 1.0, dtype=dtype))
        assert isinstance(buckets.result["w"], torch.Tensor)
        assert buckets.result["w"].dtype == dtype
        assert (buckets.result["w"] == step + 1).all()
        assert type(buckets.result["b"]) is np.ndarray
    buckets.close()


def test_gathered_tensors(strategy):
    rank, ranks = strategy.extended.replica_id, strategy.num_replicas_in_sync
    rows = torch.full((rank, 2), rank, dtype=torch.bfloat16)
    got = strategy.gather((rows, torch.tensor([rank])), axis=0)
    assert got[0].dtype == torch.bfloat16
    assert got[0].shape == (sum(range(ranks)), 2)
    assert got[1].tolist() == list(range(ranks))


def test_a_replica_function_gets_and_returns_tensors(strategy):
    def step(x):
        context = mpidist.get_replica_context()
        return context.all_reduce("MEAN", [x, x.sum()])

    mean, total = strategy.run(step, (torch.ones(3),))
    assert torch.equal(strategy.experimental_local_results(mean)[0], torch.ones(3))
    assert strategy.experimental_local_results(total)[0] == 3


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int32", "complex64"])
def test_dtypes_of_totals(strategy, op, dtype):
    n = strategy.num_replicas_in_sync
    got = strategy.reduce(op, torch.ones(3, dtype=getattr(torch, dtype)))
    is_int_mean = (op, dtype) == ("MEAN", "int32")
    assert got.dtype == (torch.float64 if is_int_mean else getattr(torch, dtype))
    assert got.tolist() == [n if op == "SUM" else 1] * 3


def test_views_and_empty_tensors(strategy):
    n = strategy.num_replicas_in_sync
    base = torch.arange(12.0).reshape(3, 4)
    for value in (base.T, base[:, ::2], base[:0], torch.tensor(2.0)):
        got = strategy.reduce("SUM", value)
        assert tuple(got.shape) == tuple(value.shape)
        np.testing.assert_array_equal(got.numpy(), value.numpy() * n)
    mean = strategy.reduce("MEAN", base, axis=0)
    np.testing.assert_array_equal(np.asarray(mean), base.numpy().mean(axis=0))


def test_a_tensor_that_requires_a_gradient_is_refused_by_name(strategy):
    with pytest.raises(TypeError, match=r"value\['w'\].*detach"):
        strategy.reduce("SUM", {"w": torch.ones(2, requires_grad=True), "x": 1.0})
    assert strategy.reduce("SUM", 1) == strategy.num_replicas_in_sync


def lazy(kind):
    """Return a tensor whose memory holds other numbers than its own."""
    x = torch.arange(1.0, 5.0)
    if kind == "bfloat16":
        return torch._neg_view(x.bfloat16())
    z = torch.complex(x, 10 * x).to(getattr(torch, kind)).conj()
    return z if kind == "complex64" else z.imag


def in_replica(name, *before, **more):
    def call(strategy, tensor, folder):
        context = mpidist.get_replica_context
        fn = lambda: (getattr(context(), name)(*before, tensor, **more),)  # noqa: E731
        return strategy.experimental_local_results(strategy.run(fn)[0])[0]

    return call


def variable(strategy, tensor):
    with strategy.scope():
        first, second = mpidist.Variable(tensor), mpidist.Variable(tensor * 0)
    second.assign(tensor)
    np.testing.assert_array_equal(second.numpy(), first.numpy())
    return first.numpy()


def in_buckets(strategy, tensor):
    buckets = strategy.gradient_buckets([tensor], "MEAN")
    with buckets:
        buckets.put(0, tensor)
    buckets.close()
    return buckets.result[0]


def written(strategy, tensor, folder):
    h5py = pytest.importorskip("h5py")
    path = folder / "rows.h5"
    with mpidist.Hdf5Writer(strategy, path, overwrite=True) as writer:
        writer.append({"x": tensor})
    with h5py.File(path) as file:
        return file["x"][:4]


def restored(strategy, tensor, folder):
    pytest.importorskip("h5py")
    saved = mpidist.Checkpoint(x=tensor, strategy=strategy).save(folder / "saved")
    other = mpidist.Checkpoint(x=tensor + 1, strategy=strategy)
    other.restore(saved)
    onto = mpidist.Checkpoint(x=(tensor + 1).conj().resolve_conj(), strategy=strategy)
    onto.x = torch._neg_view(onto.x)  # restored where memory holds other numbers
    onto.restore(saved)
    assert (onto.x == other.x).all()
    return other.x


ENTRIES = {
    "reduce": lambda s, x, _: s.reduce("MEAN", x),
    "reduce over axis": lambda s, x, _: s.reduce("MEAN", x[None], axis=0),
    "gather": lambda s, x, _: s.gather(x, axis=0)[:4],
    "broadcast": lambda s, x, _: s.broadcast(x),
    "broadcast_to": lambda s, x, _: s.extended.broadcast_to(x, "CPU:0").values[0],
    "gather_objects": lambda s, x, _: s.gather_objects({"x": x})[-1]["x"],
    "symmetric_like": lambda s, x, _: s.symmetric_like(x).copy_(x),
    "Variable": lambda s, x, _: variable(s, x),
    "gradient_buckets": lambda s, x, _: in_buckets(s, x),
    "from_tensor_slices": lambda s, x, _: next(
        iter(mpidist.Dataset.from_tensor_slices(x).batch(4))
    ),
    "map": lambda s, x, _: next(iter(mpidist.Dataset.range(1).map(lambda i: x))),
    "statistics_of": lambda s, x, _: s.statistics_of(x[:1, None]).mean,
    "Hdf5Writer": written,
    "Checkpoint": restored,
    "all_reduce": in_replica("all_reduce", "MEAN"),
    "all_gather": in_replica("all_gather", axis=0),
    "all_to_all": in_replica("all_to_all", axis=0),
    "reduce_scatter": in_replica("reduce_scatter", "MEAN", axis=0),
}


@pytest.mark.parametrize("kind", ["complex128", "complex64", "bfloat16"])
@pytest.mark.parametrize("entry", ENTRIES)
def test_numbers_that_tensors_negate_or_conjugate_lazily(
    strategy, mpi_tmp_path, entry, kind
):
    tensor = lazy(kind)
    plain = tensor.resolve_conj().resolve_neg().clone()
    call = ENTRIES[entry]
    try:
        expected = call(strategy, plain, mpi_tmp_path)
    except mpidist.MpidistError as refused:
        with pytest.raises(type(refused)):
            call(strategy, tensor, mpi_tmp_path)
        return
    found = call(strategy, tensor, mpi_tmp_path)
    assert type(found) is type(expected)
    assert found.tolist() == expected.tolist()
