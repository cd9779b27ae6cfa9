"""Batches as tensors, and datasets of PyTorch as rows."""

import functools
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpidist

torch = pytest.importorskip("torch")
data = torch.utils.data

from mpidist.data import contents  # noqa: E402
from mpidist.torch import as_tensors, from_dataset  # noqa: E402 - after the skip
from mpidist.torch.data import to_tensors  # noqa: E402

X = np.arange(44, dtype="f4").reshape(11, 4)
Y = np.arange(11)


class Rows(data.Dataset):
    """Images and labels, as lists, which notes what is read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        if not 0 <= i < len(X):
            raise IndexError(i)
        self.read.append(i)
        return [torch.from_numpy(X[i]), int(Y[i])]


class Stream(data.IterableDataset):
    def __iter__(self):
        return iter([{"x": torch.from_numpy(x), "y": y} for x, y in zip(X, Y)])


def distribute(strategy, dataset):
    return as_tensors(strategy.experimental_distribute_dataset(dataset))


def everyone(strategy, batches):
    """Return the rows of all replicas of each batch."""
    return [tuple(strategy.gather(part, axis=0) for part in batch) for batch in batches]


def assert_all_rows(strategy, batches, order=None):
    whole = everyone(strategy, batches)
    x = torch.cat([x for x, _ in whole])
    y = torch.cat([y for _, y in whole])
    order = y.numpy() if order is None else order
    assert sorted(y.tolist()) == list(range(11))
    np.testing.assert_array_equal(y, Y[order])
    np.testing.assert_array_equal(x, X[order])


def test_rows_of_hdf5_are_the_memory_of_tensors(strategy, comm, mpi_tmp_path):
    path = mpi_tmp_path / "rows.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            file["x"], file["y"] = X, Y
    comm.Barrier()
    rows = mpidist.Dataset.from_hdf5(path, ["x", "y"]).shuffle(seed=0).batch(4)
    train = distribute(strategy, rows)
    assert len(train) == 3
    batches = list(train)
    assert isinstance(batches[0][0], torch.Tensor)
    assert batches[0][0].dtype == torch.float32
    assert_all_rows(strategy, batches)
    # A place in an epoch is the iterator's
    iterator = iter(train)
    next(iterator)
    state = iterator.get_state()
    rest = everyone(strategy, iterator)
    iterator = iter(train)
    iterator.set_state(state)
    for got, want in zip(everyone(strategy, iterator), rest, strict=True):
        assert torch.equal(got[1], want[1])
    iterator.close()


def test_tensors_share_the_memory_of_arrays():
    array = np.zeros((2, 3))
    tensor = to_tensors({"x": array})["x"]
    tensor += 1
    assert array.sum() == 6
    import ml_dtypes

    half = np.ones(3, ml_dtypes.bfloat16)
    tensor = to_tensors((half,))[0]
    assert tensor.dtype == torch.bfloat16
    tensor += 1
    assert half.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "array",
    [
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.arange(6.0)[::-1],
        np.arange(3, dtype=">i4"),
        np.float64(2.5),
        np.array([True, False]),
    ],
)
def test_other_arrays_are_copied(array):
    tensor = to_tensors(array)
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_text_is_an_error_by_name():
    with pytest.raises(mpidist.DataError, match="cannot be a tensor"):
        to_tensors(np.array(["a"]))


def test_each_rank_reads_its_rows_of_a_map_style_dataset(strategy):
    rows = Rows()
    dataset = from_dataset(rows).shuffle(seed=0).batch(4)
    assert_all_rows(strategy, distribute(strategy, dataset))
    if strategy.num_replicas_in_sync > 1:
        read = strategy.gather_objects(len(set(rows.read)))
        assert max(read) < len(X)  # and one for the dtypes


def test_an_iterable_dataset(strategy):
    batches = [
        (batch["x"], batch["y"])
        for batch in distribute(strategy, from_dataset(Stream()).batch(4))
    ]
    assert_all_rows(strategy, batches, np.arange(11))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader(strategy, workers):
    loader = data.DataLoader(Rows(), batch_size=4, num_workers=workers)
    batches = list(distribute(strategy, loader))
    assert all(type(batch) is tuple for batch in batches)
    assert_all_rows(strategy, batches, np.arange(11))


def test_lists_of_equal_shapes_are_not_stacked(strategy):
    pairs = data.TensorDataset(torch.zeros(8, 3), torch.ones(8, 3))
    for x, y in distribute(strategy, data.DataLoader(pairs, batch_size=4)):
        assert (x == 0).all()
        assert (y == 1).all()
    batches = [[torch.zeros(4), torch.ones(4)]]
    ((x, y),) = distribute(strategy, batches)
    assert (x == 0).all()
    assert (y == 1).all()


def test_loaders_that_differ_from_rank_to_rank_are_refused(strategy):
    distribute = strategy.experimental_distribute_dataset
    shuffled = data.DataLoader(Rows(), batch_size=4, shuffle=True)
    text = r"RandomSampler \(shuffle=True\).*from_dataset\(dataset\)\.shuffle"
    with pytest.raises(ValueError, match=text):
        distribute(shuffled)
    part = data.DistributedSampler(Rows(), 2, 0)
    with pytest.raises(ValueError, match="DistributedSampler"):
        distribute(data.DataLoader(Rows(), batch_size=4, sampler=part))
    batches = data.BatchSampler(data.RandomSampler(Rows()), 4, drop_last=False)
    with pytest.raises(ValueError, match="RandomSampler"):
        distribute(data.DataLoader(Rows(), batch_sampler=batches))
    with pytest.raises(ValueError, match="no batch_size"):
        distribute(data.DataLoader(Rows(), batch_size=None))
    with pytest.raises(TypeError, match="from_dataset"):
        distribute(Rows())


def test_datasets_and_iterators_say_what_they_are(strategy):
    train = distribute(strategy, from_dataset(Rows()).batch(4))
    assert repr(train) == f"<TensorDataset: of {train._dataset!r}>"
    iterator = iter(train)
    next(iterator)
    text = "<TensorIterator: of <DistributedIterator: step 1 of"
    assert repr(iterator).startswith(text)


def test_what_is_no_dataset():
    with pytest.raises(TypeError, match=r"loader\.dataset"):
        from_dataset(data.DataLoader(Rows()))
    with pytest.raises(TypeError, match="not 3"):
        from_dataset(3)
    with pytest.raises(TypeError, match="experimental_distribute_dataset"):
        as_tensors(mpidist.Dataset.range(3))


def test_an_error_of_a_dataset_is_raised_on_all_ranks(strategy):
    rank = strategy.extended.replica_id

    class Failing(Rows):
        def __getitem__(self, i):
            if rank == 0:
                raise OSError("no such image")
            return super().__getitem__(i)

    with pytest.raises(OSError, match="no such image"):
        list(distribute(strategy, from_dataset(Failing()).batch(4)))


def test_tensors_are_sources_of_rows(strategy):
    ranks = strategy.num_replicas_in_sync
    tensors = {
        name: torch.arange(4 * ranks).to(getattr(torch, name))
        for name in ("float32", "int64", "bfloat16", "float16", "bool")
    }
    rows = mpidist.Dataset.from_tensor_slices(tensors).batch(4 * ranks)
    batches = as_tensors(strategy.experimental_distribute_dataset(rows))
    first = 4 * strategy.extended.replica_id
    for name, got in next(iter(batches)).items():
        assert got.dtype == tensors[name].dtype
        assert torch.equal(got, tensors[name][first : first + 4]), name


SAME = np.arange(24.0)


def own(comm):
    """Rows in an order of this rank alone."""
    return np.random.default_rng(comm.rank).permutation(SAME)


class Indexable:
    def __init__(self, rows):
        self.rows = {"nested": [rows]}

    def __len__(self):
        return len(SAME)

    def __getitem__(self, i):
        return self.rows["nested"][0][i]


class ByFunction(Indexable):
    def __init__(self, rows):
        self.rows = None
        self.read = functools.partial(lambda i: rows[i])

    def __getitem__(self, i):
        return self.read(i)


def split_at_random(comm):
    seed = torch.Generator().manual_seed(comm.rank)
    return data.random_split(pairs(SAME), [20, 4], generator=seed)[0]


def pairs(*columns):
    return data.TensorDataset(*map(torch.tensor, columns))


def table(columns):
    return pytest.importorskip("pandas").DataFrame(columns)


DIFFER = {
    "tensors": lambda c: pairs(SAME, own(c)),
    "split": split_at_random,
    "joined": lambda c: data.ConcatDataset([pairs(SAME), pairs(own(c))]),
    "own class": lambda c: Indexable(own(c)),
    "function": lambda c: ByFunction(own(c)),
    "paths": lambda c: Indexable([Path(f"/data/{x}.png") for x in own(c)]),
    "samples": lambda c: Indexable([(f"{x}.png", 0) for x in own(c)]),
    "labels": lambda c: Indexable([("a.png", x) for x in own(c).tolist()]),
    "records": lambda c: Indexable([{"i": 0, "x": str(x)} for x in own(c)]),
    "unlike records": lambda c: Indexable([{"i": SAME}, {"x": own(c)}] * 2),
    "second records": lambda c: Indexable(
        [[("a", i) for i in range(24)], [("b", x) for x in own(c).tolist()]]
    ),
    "objects": lambda c: Indexable(np.array([*own(c), None])),
    "objects with arrays": lambda c: Indexable(
        np.array([None, own(c), Indexable(0)], dtype=object)
    ),
    "bytes": lambda c: Indexable([str(x).encode() for x in own(c)]),
    "huge integers": lambda c: Indexable([2**70 + int(x) for x in own(c)]),
    "table": lambda c: Indexable(table({"x": own(c), "y": "a"})),
    "column": lambda c: Indexable(table({"x": own(c)})["x"]),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", DIFFER)
def test_what_a_dataset_holds_is_compared(strategy, comm, name):
    dataset = from_dataset(DIFFER[name](comm))
    with pytest.raises(mpidist.MismatchError, match="dataset"):
        strategy.experimental_distribute_dataset(dataset.batch(4))


def test_equal_rows_in_a_folder_of_each_node_are_distributed(strategy, comm):
    samples = [(Path(f"/node{comm.rank}/{x}.png"), x) for x in SAME]
    strange = np.array([object(), None, SAME], dtype=object)
    for rows in (samples, [*SAME], [], [()] * 24, [[]], strange, ["", "\ud800"]):
        strategy.experimental_distribute_dataset(from_dataset(Indexable(rows)).batch(4))


@pytest.mark.mpi(min_size=2)
def test_of_long_lists_of_arrays_some_are_compared(strategy, comm, monkeypatch):
    lines = []
    monkeypatch.setattr(contents, "_MOST_ITEMS", 10)
    monkeypatch.setattr(contents.logs, "info", lambda _, text: lines.append(text))
    rows = Indexable([np.full(2, x) for x in range(24)])
    strategy.experimental_distribute_dataset(from_dataset(rows).batch(4))
    assert any("24 items: one of 3 is compared" in line for line in lines)
    rows.rows["nested"][0][21] += comm.rank
    with pytest.raises(mpidist.MismatchError, match="21"):
        strategy.experimental_distribute_dataset(from_dataset(rows).batch(4))
