"""Caches in one process, and one per node for datasets divided over replicas."""

from __future__ import annotations

import collections
import copy
import itertools
import pickle
import threading
from typing import NamedTuple

import h5py
import numpy as np
import pytest
from all_ranks import mine, require_usable
from datasets import joined, lists, numbers, require_no_new_threads

import mpidist
from mpidist import AutoShardPolicy, Dataset, InputOptions, Options
from mpidist.data.map_dataset import SourceMapDataset
from mpidist.util.available_memory import free_bytes


@pytest.fixture
def strategy(new_strategy):
    """One that nothing has been counted for."""
    return new_strategy


MESSAGE = "damaged on purpose"


class Pair(NamedTuple):
    x: np.ndarray
    y: np.ndarray


class Counting:
    """Rows of arrays, which notes the numbers of those that are read."""

    def __init__(self, arrays):
        self._arrays = arrays
        self.read_rows = []

    def __len__(self):
        return len(next(iter(self._arrays.values())))

    def describe(self):
        return f"counting {[(k, a.dtype, a.shape) for k, a in self._arrays.items()]}"

    def read(self, rows):
        self.read_rows.extend(rows.tolist())
        return {name: array[rows] for name, array in self._arrays.items()}


def counting(n):
    """A source, and a dataset of the numbers 0..n-1."""
    source = Counting({"x": np.arange(n)})
    return source, Dataset(SourceMapDataset(source)).map(lambda element: element["x"])


def in_order(strategy, comm, batches):
    """The rows of all ranks, batch by batch."""
    everyone = comm.allgather([part.tolist() for part in mine(strategy, batches)])
    return [joined(parts) for parts in zip(*everyone)]


# One process

BUILDS = {
    "rows": lambda d: d.cache(),
    "batch after": lambda d: d.cache().batch(4),
    "batch before": lambda d: d.batch(4).cache(),
    "shuffle after": lambda d: d.cache().shuffle(seed=1).batch(4),
    "shuffle before": lambda d: d.shuffle(seed=1).cache().batch(4),
    "shuffled batches": lambda d: d.batch(4).shuffle(seed=1).cache(),
    "batches shuffled": lambda d: d.batch(4).cache().shuffle(seed=1),
    "map before": lambda d: d.map(lambda x: x / 2).cache().batch(4),
    "map after": lambda d: d.batch(4).cache().map(lambda x: x / 2),
    "map of batches": lambda d: d.batch(4).map(lambda x: x / 2).cache(),
    "threads": lambda d: d.batch(4).map(lambda x: x / 2, 3).cache(),
    "window": lambda d: d.cache().skip(3).take(11).batch(4),
    "two caches": lambda d: d.cache().map(lambda x: x + 1).batch(4).cache(),
    "remainder": lambda d: d.batch(4, drop_remainder=True).cache(),
}
PARTS = "window", "remainder"


@pytest.mark.parametrize("name", BUILDS)
def test_elements_are_read_once(name):
    source, rows = counting(17)
    dataset = BUILDS[name](rows)
    list(dataset)
    assert set(collections.Counter(source.read_rows).values()) == {1}
    seen = len(source.read_rows)
    list(dataset)
    list(dataset)
    assert len(source.read_rows) == seen


def test_a_generator_runs_until_a_pass_is_complete_and_not_again():
    starts = []

    def rows():
        starts.append(1)
        yield from map(np.int64, range(4))

    dataset = Dataset.from_generator(rows).cache()
    for x in dataset:
        if x == 2:
            break
    for _ in range(3):
        assert lists(dataset) == list(range(4))
    assert len(starts) == 2
    assert lists(dataset.repeat(2)) == 2 * list(range(4))
    assert len(starts) == 2


def test_datasets_of_one_cache_share_it():
    source, rows = counting(20)
    cached = rows.shuffle(seed=3).cache()
    halves = [lists(cached.shard(2, i)) for i in range(2)]
    assert sorted(joined(halves)) == list(range(20))
    whole = lists(cached)
    assert [whole[::2], whole[1::2]] == halves
    assert joined(lists(cached.batch(6))) == whole
    assert sorted(source.read_rows) == list(range(20))


def test_asking_for_the_element_spec_does_not_choose_the_order():
    dataset = numbers(50).shuffle().cache()
    assert dataset.element_spec == mpidist.TensorSpec((), np.int64)
    assert dataset.batch(3).element_spec == mpidist.TensorSpec((None,), np.int64)
    other = numbers(50).shuffle().cache()
    assert other.element_spec == dataset.element_spec
    assert lists(dataset) != lists(other)


def test_random_maps_are_computed_once():
    random = np.random.default_rng()
    dataset = numbers(9).map(lambda x: x + random.random()).cache()
    first = lists(dataset)
    assert lists(dataset) == first
    assert lists(dataset.batch(4)) == [first[:4], first[4:8], first[8:]]


def test_changing_what_was_handed_out_does_not_change_the_cache():
    plain = Dataset.from_tensor_slices(np.zeros((4, 2)))
    for dataset in (plain.cache(), plain.cache().batch(2), plain.batch(2).cache()):
        for _ in range(3):
            for batch in dataset:
                assert not batch.any()
                batch += 1
    generated = Dataset.from_generator(lambda: iter(np.zeros((3, 2)))).cache()
    for _ in range(3):
        for row in generated:
            assert not row.any()
            row += 1


RAGGED = [np.arange(2), np.arange(2), np.arange(3), np.array([0.5, 1]), np.arange(2)]


def test_elements_of_any_kind_are_kept_in_one_process():
    objects = ["a", None, {"x": 1}, (1, "b"), 2.5]
    for elements in (objects, RAGGED, ["a", "bcd", "ef"], [1, 2.5, 1j]):
        calls = []

        def get(i, calls=calls, elements=elements):
            calls.append(i)
            return elements[i]

        dataset = numbers(len(elements)).map(get).cache()
        for _ in range(2):
            found = list(dataset)
            np.testing.assert_equal(found, elements)
            types = [np.asarray(e).dtype for e in elements]
            assert [np.asarray(e).dtype for e in found] == types
        assert len(calls) == len(elements)


def test_batches_of_rows_of_unlike_dtypes_are_kept_too():
    texts = ["x" * (1 + i % 5) for i in range(12)]
    dataset = numbers(12).map(lambda i: np.array(texts[i])).cache().batch(3)
    for _ in range(2):
        assert joined(lists(dataset)) == texts


def test_a_failure_in_one_process_is_not_kept():
    failed = []

    def fail_once(x):
        if x == 3 and not failed:
            failed.append(x)
            raise OSError(MESSAGE)
        return x

    for build in (lambda d: d.cache(), lambda d: d.cache().batch(4)):
        failed.clear()
        dataset = build(numbers(6).map(fail_once))
        with pytest.raises(OSError, match=MESSAGE):
            list(dataset)
        assert np.concatenate([np.atleast_1d(x) for x in dataset]).tolist() == [
            *range(6)
        ]


def test_a_copy_of_a_dataset_starts_with_an_empty_cache():
    source, rows = counting(6)
    dataset = rows.cache().batch(4)
    first = lists(dataset)
    assert lists(copy.deepcopy(dataset)) == first
    plain = numbers(6).cache().batch(4)
    assert lists(pickle.loads(pickle.dumps(plain))) == first == lists(plain)
    list(dataset)
    assert sorted(source.read_rows) == list(range(6))


def test_an_endless_dataset_is_refused():
    with pytest.raises(ValueError, match="before repeat"):
        next(iter(numbers(3).repeat().cache()))
    assert lists(numbers(3).cache().repeat().take(7)) == [0, 1, 2, 0, 1, 2, 0]


# Divided over replicas


def once_per_node(strategy, comm, source, rows):
    """Require that each row was read on one rank of each node, and forget it."""
    node = strategy.extended.topology.node
    found = collections.Counter(itertools.chain(*node.allgather(source.read_rows)))
    assert found == collections.Counter(rows)
    source.read_rows.clear()
    comm.Barrier()


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("name", [n for n in BUILDS if n not in PARTS])
def test_each_row_is_read_once_on_a_node(strategy, comm, name, ahead):
    source, rows = counting(17)
    dataset = BUILDS[name](rows)
    dataset = dataset if dataset.pipeline.is_batched else dataset.batch(5)
    options = InputOptions(experimental_per_replica_buffer_size=ahead)
    divided = strategy.experimental_distribute_dataset(dataset, options)
    list(divided)
    once_per_node(strategy, comm, source, range(17))
    list(divided)
    list(divided)
    once_per_node(strategy, comm, source, [])


def test_only_the_rows_that_are_asked_for_are_read(strategy, comm):
    source, rows = counting(40)
    dataset = rows.cache().skip(10).take(20).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(2):
        next(iterator)
    comm.Barrier()
    iterator.close()
    comm.Barrier()
    everyone = set(itertools.chain(*comm.allgather(source.read_rows)))
    assert everyone >= {*range(10, 18)}
    assert everyone <= {0, *range(10, 26)}  # 0 shows what rows look like


def test_a_drawn_order_is_kept_when_a_cache_is_divided_again(strategy, comm):
    source, rows = counting(24)
    cached, found = rows.shuffle().cache(), []
    for parts in ([cached], [cached], [cached.take(7), cached.skip(7)]):
        datasets = [
            strategy.experimental_distribute_dataset(part.batch(5)) for part in parts
        ]
        found.append(joined(joined(in_order(strategy, comm, d)) for d in datasets))
    assert sorted(found[0]) == list(range(24))
    assert found == [found[0]] * 3
    once_per_node(strategy, comm, source, range(24))
    assert len(strategy.extended.node_memory) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("batch_first", [False, True])
def test_each_node_reads_what_its_ranks_need_once(comm, batch_first):
    """Every second rank is on another node: that is how the strategy sees it."""
    strategy = mpidist.MirroredStrategy(communicator=comm)
    topology = strategy.extended.topology
    node = topology.node
    topology.node = topology.comm.Split(comm.rank % 2)
    source, rows = counting(50)
    dataset = rows.batch(8).cache() if batch_first else rows.cache().batch(8)
    dataset = dataset.shuffle(seed=1)
    divided = strategy.experimental_distribute_dataset(dataset)
    for _ in range(4):
        found = joined(in_order(strategy, comm, divided))
        assert sorted(found) == list(range(50))
    read = joined(topology.node.allgather(source.read_rows))
    assert len(set(read)) == len(read)
    everything = joined(comm.allgather(source.read_rows))
    assert set(everything) == set(range(50))
    strategy.experimental_finalize()
    node.Free()


def test_ranks_that_divide_unlike_caches_get_a_new_one(strategy, comm):
    one, other = numbers(8).cache().batch(4), numbers(8).cache().batch(4)
    for dataset in (one, other):
        list(strategy.experimental_distribute_dataset(dataset))
    mixed = one if comm.rank == 0 else other
    divided = strategy.experimental_distribute_dataset(mixed)
    assert in_order(strategy, comm, divided) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    memory = strategy.extended.node_memory
    assert memory._made == (2 if comm.size == 1 else 3)
    assert len(memory) == 2  # nobody uses the one before


def test_caches_that_nobody_has_any_more_are_freed(strategy, comm):
    memory = strategy.extended.node_memory
    for i in range(3):
        divided = strategy.experimental_distribute_dataset(
            numbers(12 + i).cache().batch(4)
        )
        assert joined(in_order(strategy, comm, divided)) == list(range(12 + i))
        assert len(memory) == 1
    kept = divided
    strategy.experimental_distribute_dataset(numbers(5).cache().batch(4))
    assert in_order(strategy, comm, kept)[0] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "build",
    [
        lambda x, y: (x, y),
        lambda x, y: {"b": x, "a": (y, {"c": x})},
        Pair,
        collections.namedtuple("Local", ["x", "y"]),  # which cannot be pickled
    ],
)
@pytest.mark.parametrize("batch_first", [False, True])
def test_nests_keep_their_structure(strategy, build, batch_first):
    x, y = np.arange(11), np.ones((11, 2), np.float16)
    rows = Dataset.from_tensor_slices((x, y)).map(build)
    dataset = rows.batch(4).cache() if batch_first else rows.cache().batch(4)
    divided = strategy.experimental_distribute_dataset(dataset)
    plain = strategy.experimental_distribute_dataset(rows.batch(4))
    for _ in range(2):
        for found, expected in zip(divided, plain, strict=True):
            np.testing.assert_equal(
                strategy.experimental_local_results(found),
                strategy.experimental_local_results(expected),
            )


def write_files(folder, count):
    paths = [folder / f"{i}.h5" for i in range(count)]
    for i, path in enumerate(paths):
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(5.0) + 5 * i
    return paths


def test_whole_files_are_kept_by_the_rank_that_reads_them(strategy, comm, tmp_path):
    calls = []
    paths = write_files(tmp_path, comm.size + 1)
    rows = Dataset.from_hdf5(paths, "x").map(lambda x: calls.append(x) or x)
    dataset = rows.cache().batch(4).with_options(Options(AutoShardPolicy.FILE))
    divided = strategy.experimental_distribute_dataset(dataset)
    whole = list(range(5 * len(paths)))
    first = in_order(strategy, comm, divided)
    assert sorted(joined(first)) == whole
    seen = len(calls)
    assert in_order(strategy, comm, divided) == first
    assert len(calls) == seen


def test_rows_of_files_are_read_once(strategy, comm, tmp_path):
    paths = write_files(tmp_path, 3)
    dataset = Dataset.from_hdf5(paths, "x").cache().shuffle(seed=1).batch(4)
    divided = strategy.experimental_distribute_dataset(dataset)
    first = in_order(strategy, comm, divided)
    for path in paths:  # they are never opened again
        path.unlink()
    second = in_order(strategy, comm, divided)
    assert first != second
    assert sorted(joined(first)) == sorted(joined(second)) == list(range(15))


@pytest.mark.parametrize("batch_first", [False, True])
def test_datasets_of_a_function_are_kept_by_their_replica(strategy, comm, batch_first):
    source, rows = counting(20)
    cached = rows.shuffle().cache()
    if comm.rank == 0:
        list(cached.take(7))  # its order is not that of the other replicas
        source.read_rows.clear()

    def make(context):
        where = context.num_input_pipelines, context.input_pipeline_id
        if batch_first:
            return rows.shard(*where).batch(3).cache()
        return cached.shard(*where).batch(3)

    divided = strategy.distribute_datasets_from_function(make)
    first = in_order(strategy, comm, divided)
    assert sorted(joined(first)) == list(range(20))
    read = len(source.read_rows)
    assert in_order(strategy, comm, divided) == first
    assert len(source.read_rows) == read


def test_generators_of_a_function_are_kept_by_their_replica(strategy, comm):
    starts = []

    def rows():
        starts.append(1)
        yield from (np.arange(i + 1) for i in range(3 + comm.rank))

    divided = strategy.distribute_datasets_from_function(
        lambda _: Dataset.from_generator(rows).map(len).cache().batch(2)
    )
    first = in_order(strategy, comm, divided)
    seen = len(starts)
    assert in_order(strategy, comm, divided) == first
    assert len(starts) == seen


# States


def test_an_iterator_from_before_a_set_state_keeps_its_order(strategy, comm):
    divided, other = (
        strategy.experimental_distribute_dataset(
            numbers(40).shuffle().cache().batch(4),
            InputOptions(experimental_per_replica_buffer_size=0),
        )
        for _ in range(2)
    )
    expected = joined(in_order(strategy, comm, divided))
    restored = joined(in_order(strategy, comm, other))
    before, after = iter(divided), iter(divided)
    head = in_order(strategy, comm, itertools.islice(before, 3))
    after.set_state(iter(other).get_state())
    found = head + in_order(strategy, comm, before)
    assert joined(found) == expected
    assert joined(in_order(strategy, comm, after)) == restored


def test_datasets_of_one_cache_take_states_in_turn(strategy, comm):
    def divide():
        cached = numbers(12).shuffle().cache()
        beside = Dataset.zip(cached, cached.take(12)).map(lambda x, _: x)
        return [
            strategy.experimental_distribute_dataset(rows.batch(4))
            for rows in (beside, cached)
        ]

    for saved, restored in zip(divide(), divide()):
        expected = joined(in_order(strategy, comm, saved))
        joined(in_order(strategy, comm, restored))
        iterator = iter(restored)
        iterator.set_state(iter(saved).get_state())
        assert joined(in_order(strategy, comm, iterator)) == expected


def test_the_cached_rows_of_a_job_that_goes_on_with_its_order_stay(strategy, comm):
    source, rows = counting(20)
    cached = strategy.experimental_distribute_dataset(rows.shuffle().cache().batch(4))
    list(cached)
    iterator = iter(cached)
    next(iterator)
    iterator.set_state(iterator.get_state())
    list(iterator)
    once_per_node(strategy, comm, source, range(20))


# What cannot be cached


def vlen_strings(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=["a", "bc", "def"], dtype=h5py.string_dtype())
    return Dataset.from_hdf5(path, "x")


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda _: numbers(9).repeat().cache().batch(3), "infinite"),
        (lambda _: numbers(9).repeat().batch(3).cache(), "infinite"),
        (
            lambda _: Dataset.from_generator(lambda: range(4)).cache().batch(2),
            "generator",
        ),
        (lambda _: Dataset.from_generator(range(4)).batch(2).cache(), "generator"),
        (lambda path: vlen_strings(path).cache().batch(2), "object"),
        (lambda path: vlen_strings(path).batch(2).cache(), "object"),
        (lambda _: numbers(9).map(lambda x: None).cache().batch(3), "object"),
        (lambda _: numbers(9).map(lambda x: ()).cache().batch(3), "no array"),
    ],
)
def test_what_has_no_fixed_size_is_refused(strategy, tmp_path, build, reason):
    with pytest.raises((mpidist.ArgumentError, mpidist.DataError), match=reason):
        strategy.experimental_distribute_dataset(build(tmp_path / "own.h5"))
    require_usable(strategy)


@pytest.mark.parametrize("late", [np.ones(3), np.ones(2, np.float32), np.ones((1, 2))])
def test_rows_that_differ_are_refused_on_all_ranks(strategy, late):
    """The odd one is in the last row of a batch, so the last replica finds it."""
    n = 4 * strategy.num_replicas_in_sync
    dataset = numbers(3 * n).map(lambda x: late if x >= 2 * n - 4 else np.ones(2))
    iterator = iter(strategy.experimental_distribute_dataset(dataset.cache().batch(n)))
    next(iterator)
    with pytest.raises((mpidist.ArgumentError, mpidist.DataError)):
        next(iterator)
        next(iterator)
    require_usable(strategy)


def test_a_map_of_batches_before_it_must_keep_their_rows(strategy):
    dataset = numbers(36).batch(18).map(lambda x: x[:1]).cache()
    for options in (Options(), Options(AutoShardPolicy.OFF)):
        with pytest.raises(mpidist.ArgumentError, match="one row for each row"):
            list(
                strategy.experimental_distribute_dataset(dataset.with_options(options))
            )
    require_usable(strategy)


def test_more_rows_than_the_node_has_memory_for_are_refused(strategy):
    dataset = Dataset.range(1 << 45).cache().batch(8)
    with pytest.raises(mpidist.ArgumentError, match=r"294,912.0 GiB.* has .* free"):
        strategy.experimental_distribute_dataset(dataset)
    require_usable(strategy)


@pytest.mark.slow
def test_rows_that_other_caches_will_take_are_not_given_away(strategy, comm):
    is_shared = strategy.extended.topology.node.Get_size() > 1
    half = comm.bcast(int(0.6 * min(free_bytes(is_shared).values())))
    datasets = [Dataset.range(half // 9).cache().batch(8) for _ in range(2)]
    one = strategy.experimental_distribute_dataset(datasets[0])
    assert in_order(strategy, comm, itertools.islice(one, 1)) == [[*range(8)]]
    with pytest.raises(mpidist.ArgumentError, match="other caches"):
        strategy.experimental_distribute_dataset(datasets[1])
    require_usable(strategy)


def test_more_than_2_gib_are_addressed(strategy, comm):
    row = 1 << 20
    count = 2200
    is_shared = strategy.extended.topology.node.Get_size() > 1
    if comm.allreduce(min(free_bytes(is_shared).values()) < 3 << 30):
        pytest.skip("this node has less than 3 GiB left")
    made = Dataset.range(count).map(lambda i: np.full(row, i % 251, np.uint8))
    cached = made.cache()
    divided = strategy.experimental_distribute_dataset(cached.skip(count - 9).batch(4))
    for _ in range(2):
        for step, part in enumerate(mine(strategy, divided)):
            rest = min(4, 9 - 4 * step)
            first = count - 9 + 4 * step
            expected = np.arange(first, first + rest) % 251
            share = -(-rest // comm.size)
            expected = expected[comm.rank * share : (comm.rank + 1) * share]
            assert part.min(axis=1, initial=255).tolist() == expected.tolist()
            assert part.max(axis=1, initial=0).tolist() == expected.tolist()


@pytest.mark.parametrize("batch_first", [False, True])
def test_after_a_failure_on_one_rank_no_row_is_lost(strategy, comm, batch_first):
    failed = []

    def fail_once(x):
        if (np.asarray(x) == 11).any() and not failed:
            failed.append(x)
            raise KeyError(MESSAGE)
        return x

    rows = numbers(32)
    if batch_first:
        dataset = rows.batch(8).map(fail_once, 2).cache()
    else:
        dataset = rows.map(fail_once, 2).cache().batch(8)
    before = threading.enumerate()
    divided = strategy.experimental_distribute_dataset(dataset)
    iterator = iter(divided)
    batches = [next(iterator)]
    with pytest.raises(KeyError, match=MESSAGE):
        next(iterator)
    require_usable(strategy)
    batches += iterator
    for found in (batches, divided):
        assert joined(in_order(strategy, comm, found)) == list(range(32))
    require_no_new_threads(before)


def test_a_strategy_that_ends_while_its_cache_is_read(comm):
    strategy = mpidist.MirroredStrategy(communicator=comm)
    go_on, reading = threading.Event(), threading.Event()

    def wait(x):
        if x >= 8:
            reading.set()
            assert go_on.wait(600)
        return x

    dataset = numbers(16).map(wait).cache().batch(8)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    next(iterator)
    assert reading.wait(600)
    strategy.experimental_finalize()
    go_on.set()
    with pytest.raises(mpidist.ContextError, match="final"):
        next(iterator)
    iterator.close()


SCRIPT = """
import sys
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
import mpidist

strategy = mpidist.MirroredStrategy()
dataset = mpidist.Dataset.range(10).cache().batch(4)
divided = strategy.experimental_distribute_dataset(dataset)
totals = [int(strategy.reduce("SUM", batch, axis=0)) for batch in divided]
if strategy.extended.replica_id == 0:
    print(totals)
"""


def test_a_job_may_end_without_finalizing_the_strategy(mpirun):
    ended = mpirun(2, SCRIPT, "multiple")
    assert ended.stdout.split() == ["[6,", "22,", "17]"]


@pytest.mark.slow
def test_mpi_without_threads_is_refused(mpirun):
    ended = mpirun(2, SCRIPT, "serialized", fails=True)
    assert "MPI_THREAD_MULTIPLE" in ended.stderr


# What limits memory


def fill(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_limits_of_control_groups_are_read(tmp_path):
    fill(tmp_path / "dev/shm")
    fill(tmp_path / "proc", meminfo="MemTotal: 9 kB\nMemAvailable:   7 kB\nDirty: 0")
    assert free_bytes(False, tmp_path) == {"the machine": 7 << 10}
    # The second version: the job has a limit, its step has none
    groups = tmp_path / "sys/fs/cgroup"
    stat = "anon 1\nactive_file 30\ninactive_file 4"
    fill(tmp_path / "proc/self", cgroup="0::/job/step")
    fill(groups / "job/step", memory__max="max", memory__current=5, memory__stat=stat)
    fill(groups / "job", memory__max=1000, memory__current=600, memory__stat=stat)
    assert free_bytes(False, tmp_path)["the job's control group"] == 434
    # The first version
    stat = "total_active_file 3\ntotal_inactive_file 2\nactive_file 9"
    fill(tmp_path / "proc/self", cgroup="5:cpu:/x\n4:memory:/job")
    fill(
        groups / "memory/job",
        memory__limit_in_bytes=100,
        memory__usage_in_bytes=80,
        memory__stat=stat,
    )
    free = free_bytes(True, tmp_path)
    assert free["the job's control group"] == 25
    assert free[str(tmp_path / "dev/shm")] > 0
