"""What datasets say of their elements, against the elements."""

import dataclasses

import numpy as np
import pytest

import mpidist
from mpidist import AutoShardPolicy, Dataset, Options, TensorSpec


def spec(*shape, dtype=np.int64):
    return TensorSpec(shape, dtype)


def arrays(n):
    return {"x": np.zeros((n, 8, 8), np.float32), "y": (np.zeros(n, np.int8),)}


def rows(n):
    return Dataset.from_tensor_slices(arrays(n))


def generated(n):
    def generate():
        for i in range(n):
            yield {"x": arrays(n)["x"][i], "y": (arrays(n)["y"][0][i],)}

    return Dataset.from_generator(generate)


def test_a_spec_is_a_value():
    one = TensorSpec(shape=[None, 8, 8], dtype="float32")
    assert repr(one) == "TensorSpec(shape=(None, 8, 8), dtype=float32)"
    assert one == TensorSpec((None, 8, 8), np.float32)
    assert hash(one) == hash(TensorSpec((None, 8, 8), np.float32))
    assert one != TensorSpec((None, 8, 8), np.float64)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.shape = ()


@pytest.mark.parametrize("make", [rows, generated])
def test_elements_and_batches(make):
    element = {"x": spec(8, 8, dtype="f4"), "y": (spec(dtype="i1"),)}
    batch = {"x": spec(None, 8, 8, dtype="f4"), "y": (spec(None, dtype="i1"),)}
    assert make(3).element_spec == element
    batches = make(3).shuffle(3, seed=0).batch(2)
    for dataset in (batches, batches.repeat(2).skip(1).take(1).shard(1, 0).prefetch(1)):
        assert dataset.element_spec == batch
    assert make(3).concatenate(make(2)).element_spec == element
    nested = make(4).batch(2).batch(2).element_spec
    assert nested["x"] == spec(None, None, 8, 8, dtype="f4")
    mapped = make(3).batch(2).map(lambda d: d["x"][:, 0] > 0)
    assert mapped.element_spec == spec(None, 8, dtype=bool)


def test_sources():
    assert Dataset.range(3).element_spec == spec()
    assert Dataset.from_tensors([1.0, 2.0]).element_spec == spec(2, dtype="f8")
    assert Dataset.from_generator([3.0]).element_spec == spec(dtype="f8")
    assert rows(0).batch(2).element_spec["x"] == spec(None, 8, 8, dtype="f4")


def test_a_generator_is_asked_for_one_element_once():
    started, seen = [], []

    def generate():
        started.append(True)
        for i in range(10):
            seen.append(i)
            yield i

    dataset = Dataset.from_generator(generate).shuffle(5, seed=0).batch(3)
    for _ in range(2):
        assert dataset.element_spec == spec(None)
    assert (started, seen) == ([True], [0])


def test_a_generator_without_elements_has_no_spec():
    with pytest.raises(mpidist.DataError, match="yields no element"):
        _ = Dataset.from_generator([]).batch(2).element_spec
    both = Dataset.from_generator([]).concatenate(Dataset.range(2))
    assert both.element_spec == spec()


@pytest.mark.parametrize("make", [rows, generated])
@pytest.mark.parametrize("policy", ["AUTO", "OFF"])
def test_distributed_datasets_and_iterators(strategy, make, policy):
    options = Options(auto_shard_policy=AutoShardPolicy[policy])
    dataset = make(5).batch(4).with_options(options)
    divided = strategy.experimental_distribute_dataset(dataset)
    expected = {"x": spec(None, 8, 8, dtype="f4"), "y": (spec(None, dtype="i1"),)}
    assert divided.element_spec == expected
    iterator = iter(divided)
    assert iterator.element_spec == expected
    for batch in iterator:
        part = strategy.experimental_local_results(batch["x"])[0]
        assert part.shape[1:] == expected["x"].shape[1:]
        assert part.dtype == expected["x"].dtype
        assert iterator.element_spec == expected


def test_a_replica_without_batches_knows_them_after_the_first_step(strategy, comm):
    batches = [np.zeros((2, 3), np.float32)]
    divided = strategy.distribute_datasets_from_function(
        lambda ctx: batches if ctx.input_pipeline_id == 0 else []
    )
    iterator = iter(divided)
    next(iterator)
    assert iterator.element_spec == spec(None, 3, dtype="f4")
    iterator.close()
    if comm.rank > 0:
        with pytest.raises(mpidist.DataError, match="yields no element"):
            _ = divided.element_spec
