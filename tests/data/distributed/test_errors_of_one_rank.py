"""What one rank raises before ranks exchange anything is raised on all of them."""

import collections

import numpy as np
import pytest
from all_ranks import require_usable

import mpidist
from mpidist import AutoShardPolicy, Dataset, Options
from mpidist.data.map_dataset import SourceMapDataset


class Rows:
    """Rows in two files, of which a method fails on the last rank."""

    file_count = 2
    is_indexed = False
    row_bytes = 8

    def __init__(self, method, error):
        self._failing = {method: error}

    def _call(self, method):
        if method in self._failing:
            raise self._failing[method]

    def __len__(self):
        self._call("__len__")
        return 8

    def read(self, rows):
        self._call("read")
        return np.asarray(rows)

    def describe(self):
        self._call("describe")
        return "rows"

    def identify(self):
        self._call("identify")
        return "files"

    def inspect(self, files):
        self._call("inspect")
        return [f"index of {file}" for file in files]

    def set_index(self, files, rank=None, *limits):
        self._call("set_index")

    def shard_files(self, workers, worker):
        self._call("shard_files")
        return self


def distribute(strategy, dataset, how):
    if how == "from_function":
        return strategy.distribute_datasets_from_function(lambda _: dataset)
    policy = Options(auto_shard_policy=AutoShardPolicy[how])
    return strategy.experimental_distribute_dataset(dataset.with_options(policy))


@pytest.mark.parametrize("error", [KeyError, RuntimeError, MemoryError, OSError])
@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("AUTO", "__len__"),
        ("AUTO", "describe"),
        ("AUTO", "identify"),
        ("AUTO", "inspect"),
        ("AUTO", "set_index"),
        ("AUTO", "read"),
        ("OFF", "describe"),
        ("FILE", "shard_files"),
        ("FILE", "inspect"),
        ("FILE", "set_index"),
        ("FILE", "describe"),
        ("from_function", "__len__"),
        ("from_function", "inspect"),
        ("from_function", "describe"),
        ("from_function", "read"),
    ],
)
def test_an_error_of_a_source(strategy, comm, how, method, error):
    if how == "FILE" and comm.size > Rows.file_count:
        pytest.skip("more ranks than files")
    fails = comm.rank == comm.size - 1
    rows = Rows(method if fails else None, error("damaged"))
    dataset = Dataset(SourceMapDataset(rows)).batch(4)
    with pytest.raises(error, match="damaged"):
        list(distribute(strategy, dataset, how))
    require_usable(strategy)


@pytest.mark.parametrize("how", ["AUTO", "OFF", "from_function"])
def test_an_error_of_a_function_that_makes_datasets(strategy, comm, how):
    def make(i):
        if comm.rank == comm.size - 1:
            raise RuntimeError("no dataset")
        return Dataset.range(4).batch(2)

    with pytest.raises(RuntimeError, match="no dataset"):
        distribute(strategy, Dataset.range(2).interleave(make), how)
    require_usable(strategy)


class Unsendable(collections.UserDict):
    def __reduce__(self):
        raise RuntimeError("not to be sent")


@pytest.mark.parametrize("ends", [False, True])
def test_batches_whose_structure_cannot_be_sent(strategy, comm, ends):
    """Others need it only if they have no batch of their own."""

    def generate(context):
        is_over = ends and context.input_pipeline_id == comm.size - 1
        batches = [] if is_over else [Unsendable(x=np.arange(2))]
        return Dataset.from_generator(lambda: iter(batches)).map(lambda x: x)

    def batched(context):
        return lambda: iter(generate(context))

    data = strategy.distribute_datasets_from_function(batched)
    if ends and comm.size > 1:
        with pytest.raises(mpidist.DataError, match="cannot be pickled"):
            list(data)
    else:
        assert len(list(data)) == (not ends)
    require_usable(strategy)


def test_generators_run_without_the_lock_of_the_strategy(strategy):
    holders = []

    def generate():
        for i in range(3):
            # Other threads may use the strategy while this one waits for its data
            holders.append(strategy.extended.consensus.lock.holder)
            yield np.arange(i, i + 2)

    at_once = mpidist.InputOptions(experimental_per_replica_buffer_size=0)
    batches = strategy.distribute_datasets_from_function(lambda _: generate, at_once)
    assert len(list(batches)) == 3
    assert holders == [0, 0, 0]
