"""Every row exactly once per epoch over all replicas, whatever there is to divide."""

from __future__ import annotations

import collections
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from datasets import joined
from hdf5_files import Recipe
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mpidist import AutoShardPolicy, Dataset, MirroredStrategy, Options
from mpidist.data.map_dataset import Epoch
from mpidist.util.shares import BatchShare

MOST_REPLICAS = 7
LAYOUTS = [
    Recipe(),
    Recipe((3, 2), limits=(None, 2)),
    Recipe((5, 1), ("gzip",), limits=(None, 2)),
    Recipe((2, 2), ("shuffle", "gzip", "fletcher32"), limits=(None, 2)),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """Files of so many rows each, and what is done with them."""

    counts: tuple[int, ...]
    layouts: tuple[Recipe, ...]
    batch_size: int
    drop_remainder: bool
    seed: int | None
    reshuffle: bool

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def write(self, folder: Path) -> None:
        """Write rows `(i, -i)`, numbered through all files, and `-i` beside them."""
        start = 0
        for i, (count, layout) in enumerate(zip(self.counts, self.layouts)):
            numbers = np.arange(start, start + count)
            with h5py.File(folder / f"{i:02}.h5", "w") as file:
                layout.write(file, np.stack([numbers, -numbers], axis=1), "x")
                file["y"] = -numbers
            start += count

    def dataset(self, folder: Path) -> Dataset:
        rows = Dataset.from_hdf5(sorted(folder.glob("*.h5")), {"x": "x", "y": "y"})
        if self.seed is not None:
            rows = rows.shuffle(seed=self.seed, reshuffle_each_iteration=self.reshuffle)
        return rows.batch(self.batch_size, self.drop_remainder)


def cases(most_files: int = 6, fewest_files: int = 1) -> Any:
    """Draw cases."""
    files = st.lists(
        st.tuples(st.integers(0, 13), st.sampled_from(LAYOUTS)),
        min_size=fewest_files,
        max_size=most_files,
    )
    return st.builds(
        lambda files, *rest: Case(*zip(*files), *rest),
        files,
        st.integers(1, 20),
        st.booleans(),
        st.none() | st.integers(0, 1 << 62),
        st.booleans(),
    )


def numbers_of(batch: Any) -> list[int]:
    """Return the numbers of the rows of a batch, of which all arrays must tell."""
    numbers = batch["x"][:, 0]
    assert batch["x"][:, 1].tolist() == batch["y"].tolist() == (-numbers).tolist()
    return list(map(int, numbers))


def once_each(numbers: list[int], most: int) -> bool:
    """Return whether no number below `most` is there twice, and no other."""
    counted = collections.Counter(numbers)
    return set(counted.values()) <= {1} and set(counted) <= set(range(most))


def parts_of(pipeline: Any, epoch: int, replicas: int) -> list[list[list[int]]]:
    """Return the rows of each replica, for each batch of an epoch."""
    return [
        [
            numbers_of(
                pipeline.local_batch(Epoch(epoch), i, BatchShare(replicas, replica))
            )
            for replica in range(replicas)
        ]
        for i in range(pipeline.length)
    ]


def require_batches(steps: list[list[list[int]]], case: Case) -> list[int]:
    """Return the order of an epoch; require all rows in full batches but the last."""
    order = joined(map(joined, steps))
    kept = case.rows - (case.rows % case.batch_size if case.drop_remainder else 0)
    assert len(order) == kept
    assert once_each(order, case.rows)
    sizes = [len(joined(parts)) for parts in steps]
    full, rest = divmod(kept, case.batch_size)
    assert sizes == [case.batch_size] * full + [rest] * (rest > 0)
    for parts in steps:  # no replica has more than its share, the first ones have it
        share = -(-len(joined(parts)) // len(parts))
        lengths = list(map(len, parts))
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] == share
        assert sum(0 < n < share for n in lengths) <= 1
    return order


def require_orders(orders: list[list[int]], case: Case) -> None:
    """Require orders of several epochs as the case says."""
    if case.seed is None:
        expected = list(range(case.rows))
        assert all(order == expected[: len(order)] for order in orders)
    elif not case.reshuffle:
        assert all(order == orders[0] for order in orders)
    elif len(orders[0]) > 10:
        assert len(set(map(tuple, orders))) == len(orders)
        assert all(order != sorted(order) for order in orders)


pure = settings(derandomize=True, database=None, deadline=None, max_examples=60)
# All ranks of a job draw the same and fail alike; a search for less would be long
collective = settings(
    pure,
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pure
@given(case=cases())
@pytest.mark.slow
def test_every_row_once_per_epoch_for_any_number_of_replicas(case):
    with tempfile.TemporaryDirectory() as name:
        case.write(Path(name))
        pipeline = case.dataset(Path(name)).pipeline
        again = case.dataset(Path(name)).pipeline
        orders = []
        for epoch in range(3):
            steps = parts_of(pipeline, epoch, 1)
            orders.append(require_batches(steps, case))
            for replicas in range(2, MOST_REPLICAS + 1):
                steps = parts_of(pipeline, epoch, replicas)
                assert require_batches(steps, case) == orders[-1]
            assert joined(joined(parts_of(again, epoch, 3))) == orders[-1]
        require_orders(orders, case)


@pytest.mark.slow
@pure
@given(case=cases(most_files=9))
def test_every_row_once_per_epoch_when_files_are_divided(case):
    with tempfile.TemporaryDirectory() as name:
        case.write(Path(name))
        whole = case.dataset(Path(name)).pipeline
        starts = np.cumsum([0, *case.counts]).tolist()
        for replicas in range(1, min(MOST_REPLICAS, len(case.counts)) + 1):
            share = -(-case.batch_size // replicas)
            seen = []
            for replica in range(replicas):
                mine = whole.shard_files(replicas, replica).rebatch(replicas)
                files = range(replica, len(case.counts), replicas)
                own = joined(range(starts[i], starts[i + 1]) for i in files)
                for epoch in range(2):
                    found = [
                        numbers_of(mine.element(Epoch(epoch), i))
                        for i in range(mine.length)
                    ]
                    rest = len(own) % share
                    kept = len(own) - (rest if case.drop_remainder else 0)
                    assert len(joined(found)) == kept
                    assert all(len(batch) == share for batch in found[:-1])
                    assert once_each(joined(found), case.rows)
                    assert set(joined(found)) <= set(own)
                    if case.seed is None:
                        assert joined(found) == own[:kept]
                seen += joined(found)
            assert once_each(seen, case.rows)
            assert case.drop_remainder or len(seen) == case.rows


@pytest.mark.slow
@pure
@given(case=cases(), count=st.integers(1, 3), skip=st.integers(0, 9))
def test_every_row_once_per_lap_of_a_repetition(case, count, skip):
    """Batches straddle the laps, each of which has an order of its own."""
    with tempfile.TemporaryDirectory() as name:
        case.write(Path(name))
        rows = Dataset.from_hdf5(sorted(Path(name).glob("*.h5")), {"x": "x", "y": "y"})
        seed = case.seed or 0
        repeated = rows.shuffle(seed=seed).repeat(count)
        pipeline = repeated.skip(skip).batch(case.batch_size).pipeline
        shuffled = rows.shuffle(seed=seed).batch(max(1, case.rows)).pipeline
        laps = [joined(joined(parts_of(shuffled, lap, 1))) for lap in range(count)]
        assert all(once_each(lap, case.rows) and len(lap) == case.rows for lap in laps)
        for replicas in range(1, MOST_REPLICAS + 1):
            found = joined(joined(parts_of(pipeline, 0, replicas)))
            assert found == joined(laps)[skip:]


@pure
@given(number=st.integers(0, 1 << 62), rows=st.integers(20, 400))
def test_without_a_seed_the_order_is_that_of_the_pass(number, rows):
    shuffled = Dataset.range(rows).shuffle()

    def order(epoch, number, replicas=1):
        pipeline = shuffled.batch(16).pipeline
        seeds = {shuffled.pipeline.seed: number}
        return [
            int(number)
            for i in range(pipeline.length)
            for replica in range(replicas)
            for number in pipeline.local_batch(
                Epoch(epoch, seeds), i, BatchShare(replicas, replica)
            )
        ]

    first = order(0, number)
    assert once_each(first, rows)
    assert len(first) == rows
    assert all(order(0, number, n) == first for n in range(2, MOST_REPLICAS + 1))
    assert order(1, number) != first
    assert order(0, number + 1) != first


def divided_steps(strategy, comm, dataset, epochs=1):
    """Return, on all ranks, the rows of each replica at each step of some epochs."""
    divided = strategy.experimental_distribute_dataset(dataset)
    found = []
    for _ in range(epochs):
        mine = [
            numbers_of(
                {k: strategy.experimental_local_results(v)[0] for k, v in batch.items()}
            )
            for batch in divided
        ]
        everyone = comm.allgather(mine)
        assert len({len(steps) for steps in everyone}) == 1
        assert len(divided) == len(mine)
        found.append([list(parts) for parts in zip(*everyone)])
    return found


def in_groups(comm, test):
    """Call `test(strategy, its communicator)` in groups of every number of ranks."""
    for split in range(1, comm.size + 1):
        group = comm.Split(comm.rank >= split, comm.rank)
        strategy = MirroredStrategy(communicator=group)
        test(strategy, group)
        strategy.experimental_finalize()
        group.Free()


@pytest.fixture
def new_folder(comm, mpi_tmp_path):
    """A function that returns a new folder with the files of a case, on all ranks."""
    made = []

    def make(case):
        folder = mpi_tmp_path / str(len(made))
        made.append(folder)
        if comm.rank == 0:
            folder.mkdir()
            case.write(folder)
        comm.Barrier()
        return folder

    return make


@pytest.mark.slow
@collective
@given(case=cases())
def test_every_group_of_replicas_goes_through_every_row_once(comm, new_folder, case):
    folder = new_folder(case)
    expected = case.dataset(folder).pipeline
    orders = [joined(joined(parts_of(expected, epoch, 1))) for epoch in range(2)]

    def test(strategy, group):
        found = divided_steps(strategy, group, case.dataset(folder), epochs=2)
        assert [require_batches(steps, case) for steps in found] == orders

    in_groups(comm, test)


@collective
@given(case=cases(fewest_files=4, most_files=9))
def test_every_group_divides_the_files_without_loss(comm, new_folder, case):
    folder = new_folder(case)
    case = dataclasses.replace(case, drop_remainder=False)
    by_file = Options(auto_shard_policy=AutoShardPolicy.FILE)

    def test(strategy, group):
        if group.size > len(case.counts):
            return
        dataset = case.dataset(folder).with_options(by_file)
        for steps in divided_steps(strategy, group, dataset, epochs=2):
            rows = joined(joined(steps))
            assert once_each(rows, case.rows)
            assert len(rows) == case.rows

    in_groups(comm, test)


@pytest.mark.parametrize("seed", [None, 0, 7])
def test_seeds_and_epochs_decide_the_order_and_nothing_else(strategy, comm, seed):
    dataset = Dataset.range(60).map(lambda i: {"x": np.array([i, -i]), "y": -i})
    dataset = dataset.shuffle(seed=seed).batch(7)
    divided = divided_steps(strategy, comm, dataset, epochs=4)
    orders = [joined(joined(steps)) for steps in divided]
    assert len(set(map(tuple, orders))) == 4
    assert all(sorted(order) == list(range(60)) for order in orders)
    again = divided_steps(strategy, comm, dataset, epochs=4)
    same = [joined(joined(steps)) for steps in again] == orders
    assert same == (seed is not None)
