"""Datasets divided over replicas: every row once, in one order, for any number."""

import numpy as np
import pytest
from all_ranks import in_order, local, on_all_ranks
from datasets import generated, numbers, reading_ahead, shuffled

from mpidist import AutoShardPolicy, Dataset, InputContext, InputOptions, Options
from mpidist.data.map_dataset import SourceMapDataset
from mpidist.errors import MismatchError


def rows_of(n, dtype=np.float32):
    """Rows of two dimensions, of which the first number is the row's."""
    return np.arange(n, dtype=dtype)[:, None] + np.zeros((1, 3), dtype)


BOTH = pytest.mark.parametrize("make", [numbers, generated])


@BOTH
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("drop_remainder", [False, True])
def test_14_rows_in_batches_of_8(strategy, comm, make, drop_remainder, depth):
    sizes = {
        1: [[8], [6]],
        2: [[4, 4], [3, 3]],
        3: [[3, 3, 2], [2, 2, 2]],
        4: [[2, 2, 2, 2], [2, 2, 2, 0]],
    }[comm.size]
    dataset = make(14).batch(8, drop_remainder)
    divided = strategy.experimental_distribute_dataset(dataset, reading_ahead(depth))
    count = 1 if drop_remainder else 2
    for _ in range(2):
        steps = on_all_ranks(strategy, comm, divided)
        assert [list(map(len, parts)) for parts in steps] == sizes[:count]
        assert in_order(steps) == list(range(8 if drop_remainder else 14))
    if make is numbers:
        assert len(divided) == divided.cardinality == count
    else:
        assert divided.cardinality == -2
        with pytest.raises(TypeError, match="not known"):
            len(divided)


@pytest.mark.mpi(min_size=2)
def test_balance_on_some_ranks_is_an_error_on_all(strategy, comm):
    options = InputOptions(balance_batches=comm.rank == 0)
    with pytest.raises(MismatchError, match="balance_batches"):
        strategy.experimental_distribute_dataset(numbers(8).batch(4), options)


@pytest.mark.parametrize("batch_size", [1, 2, 4, 7, 100])
@pytest.mark.parametrize("n", [0, 1, 13, 28])
def test_epochs_have_every_row_once_in_the_order_of_the_permutation(
    strategy, comm, n, batch_size
):
    dataset = numbers(n).shuffle(seed=5).batch(batch_size)
    divided = strategy.experimental_distribute_dataset(dataset)
    for epoch in range(3):
        steps = on_all_ranks(strategy, comm, divided)
        assert in_order(steps) == shuffled(n, 5, epoch)
        assert len(steps) == -(-n // batch_size)


@pytest.mark.parametrize("dtype", ["f4", "u1", "?", "S5"])
@pytest.mark.parametrize(
    "build",
    [
        lambda rows: rows.batch(3),
        lambda rows: rows.map(lambda x: x[:2]).batch(3),
        lambda rows: rows.batch(3).map(lambda x: x[:, :2]),
        lambda rows: rows.map(lambda x: x[:2]).shuffle(seed=0).repeat(2).batch(3),
        lambda rows: rows.batch(2).repeat().shard(2, 1).take(2),
    ],
)
def test_batches_without_rows_keep_dtype_and_shape(strategy, comm, build, dtype):
    dataset = build(Dataset.from_tensor_slices(rows_of(4).astype(dtype)))
    whole = next(iter(dataset))
    steps = on_all_ranks(
        strategy, comm, strategy.experimental_distribute_dataset(dataset)
    )
    for parts in steps:
        assert {part.dtype for part in parts} == {whole.dtype}
        assert {part.shape[1:] for part in parts} == {whole.shape[1:]}
    assert len(steps[-1][-1]) == 0 or comm.size < 3


def test_structures_pass_through_run_and_reduce(strategy):
    x, y = np.random.default_rng(0).normal(size=(14, 3)), np.arange(14)
    dataset = Dataset.from_tensor_slices({"x": x, "y": (y,)}).batch(8)
    batches = list(strategy.experimental_distribute_dataset(dataset))
    for rows, batch in zip([slice(8), slice(8, 14)], batches, strict=True):
        half = strategy.run(lambda b: {"half": b["x"] / 2}, (batch,))
        mean = strategy.reduce("MEAN", half, axis=0)["half"]
        np.testing.assert_allclose(mean, x[rows].mean(axis=0) / 2)
        assert strategy.reduce("SUM", batch["y"], axis=0) == (y[rows].sum(),)


def test_two_iterators_of_one_dataset_do_not_disturb_each_other(strategy, comm):
    divided = strategy.experimental_distribute_dataset(
        numbers(12).shuffle(seed=1).batch(4)
    )
    both = list(zip(divided, divided))
    for epoch in range(2):
        steps = on_all_ranks(strategy, comm, [pair[epoch] for pair in both])
        assert in_order(steps) == shuffled(12, 1, epoch)


class Recorder:
    """Rows in memory that remember which of them were read."""

    def __init__(self, n):
        self.n, self.rows = n, []

    def __len__(self):
        return self.n

    def read(self, rows):
        self.rows.extend(rows.tolist())
        return rows

    def describe(self):
        return "recorder"


def test_a_replica_reads_its_own_rows_and_no_others(strategy, comm):
    source = Recorder(30)
    dataset = Dataset(SourceMapDataset(source)).shuffle(seed=4).batch(8)
    divided = strategy.experimental_distribute_dataset(dataset)
    given = [row for b in divided for row in local(strategy, b).tolist()]
    assert source.rows == given


@pytest.mark.parametrize("old_name", [False, True])
def test_datasets_from_a_function_are_taken_as_they_are(strategy, comm, old_name):
    def make(ctx):
        rows = numbers(22).shard(ctx.num_input_pipelines, ctx.input_pipeline_id)
        return rows.shuffle(seed=1).batch(ctx.get_per_replica_batch_size(12))

    name = "distribute_datasets_from_function"
    divided = getattr(strategy, f"experimental_{name}" if old_name else name)(make)
    n, size = comm.size, 12 // comm.size
    for epoch in range(2):
        steps = on_all_ranks(strategy, comm, divided)
        for rank in range(n):
            rows = list(range(22))[rank::n]
            mine = in_order([[parts[rank]] for parts in steps])
            assert mine == [rows[i] for i in shuffled(len(rows), 1, epoch)]
            assert all(len(parts[rank]) <= size for parts in steps)


@BOTH
def test_unbatched_datasets_of_equal_length_give_their_elements(strategy, comm, make):
    divided = strategy.distribute_datasets_from_function(
        lambda ctx: make(3).map(lambda x: x + 10 * ctx.input_pipeline_id)
    )
    steps = on_all_ranks(strategy, comm, divided)
    expected = [[10 * rank + i for rank in range(comm.size)] for i in range(3)]
    assert [list(map(int, parts)) for parts in steps] == expected


def test_input_context():
    assert InputContext() == InputContext(1, 0, 1)
    ctx = InputContext(4, 2, num_replicas_in_sync=4)
    assert str(ctx) == "mpidist.InputContext(input pipeline id 2, total: 4)"
    assert ctx.get_per_replica_batch_size(12) == 3
    for size, advice in [(30, "use 28 or 32"), (3, "use 4")]:
        with pytest.raises(ValueError, match=f"{size} is not divisible.*{advice}"):
            ctx.get_per_replica_batch_size(size)


def test_functions_are_told_their_replica(strategy, comm):
    told = []
    strategy.distribute_datasets_from_function(
        lambda ctx: told.append(ctx) or numbers(2).batch(1)
    )
    assert told == [InputContext(comm.size, comm.rank, comm.size)]


@pytest.mark.parametrize("policy", ["AUTO", "OFF"])
@pytest.mark.parametrize("size", [1, 4])
def test_unlike_datasets_are_not_concatenated_on_any_replica(strategy, policy, size):
    """Also where a replica would read rows of one of them only."""
    options = Options(AutoShardPolicy[policy])
    wide, narrow = (
        Dataset.range(4).map(lambda i, dtype=dtype: i.astype(dtype)).batch(size)
        for dtype in ("f8", "i4")
    )
    dataset = wide.concatenate(narrow).with_options(options)
    divided = strategy.experimental_distribute_dataset(dataset)
    for _ in range(2):
        with pytest.raises(TypeError, match="float64 in the first and int32"):
            next(iter(divided))
    generated = Dataset.from_generator(lambda: iter(range(4))).batch(size)
    both = generated.concatenate(wide)
    divided = strategy.experimental_distribute_dataset(both)
    with pytest.raises(TypeError, match="int64 in the first and float64"):
        list(divided)
