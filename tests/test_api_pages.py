"""The examples of the three TensorFlow pages that this library follows; the reference.

With two replicas the numbers are the pages'; with others, those that follow.
"""

import sys
from pathlib import Path

import api_members
import launching
import numpy as np
import pytest
from all_ranks import local

import mpidist


def replica_id():
    return mpidist.get_replica_context().replica_id_in_sync_group


def first_batch(strategy):
    dataset = mpidist.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
    return next(iter(strategy.experimental_distribute_dataset(dataset)))


def mine(strategy, rows):
    """What this replica gets of a batch, written down apart from the library."""
    n = strategy.num_replicas_in_sync
    share = -(-len(rows) // n)
    rank = strategy.extended.replica_id
    return rows[rank * share : (rank + 1) * share]


def test_iterating_a_distributed_dataset(strategy):
    dataset = mpidist.Dataset.from_tensor_slices([5.0, 6.0, 7.0, 8.0]).batch(2)
    batches = list(strategy.experimental_distribute_dataset(dataset))
    assert len(batches) == 2
    for batch, rows in zip(batches, [[5.0, 6.0], [7.0, 8.0]], strict=True):
        np.testing.assert_array_equal(local(strategy, batch), mine(strategy, rows))
    if strategy.num_replicas_in_sync > 1:
        assert isinstance(batches[0], mpidist.PerReplica)
        rank = strategy.extended.replica_id
        assert repr(batches[0]).startswith(f"PerReplica:{{\n  {rank}: array([")


def test_run_returns_replica_ids(strategy):
    ids = strategy.run(replica_id)
    assert local(strategy, ids) == strategy.extended.replica_id
    everyone = strategy.gather(strategy.run(lambda: np.array([replica_id()])), axis=0)
    assert everyone.tolist() == list(range(strategy.num_replicas_in_sync))


def test_run_on_a_per_replica_input(strategy):
    updated = strategy.run(lambda x: x + 1.0, args=(first_batch(strategy),))
    expected = np.array(mine(strategy, [6.0, 7.0]))
    np.testing.assert_array_equal(local(strategy, updated), expected)


def test_reduce_sum_over_the_batch_axis_is_11(strategy):
    total = strategy.reduce(mpidist.ReduceOp.SUM, first_batch(strategy), axis=0)
    assert total == 11.0
    assert np.shape(total) == ()


def test_local_results_of_a_batch(strategy):
    results = strategy.experimental_local_results(first_batch(strategy))
    assert type(results) is tuple
    assert len(results) == 1
    np.testing.assert_array_equal(results[0], mine(strategy, [5.0, 6.0]))


def test_all_gather_of_one_array(strategy):
    def gather_value():
        ctx = mpidist.get_replica_context()
        return ctx.all_gather(np.array([1, 2, 3], np.int32), axis=0)

    result = local(strategy, strategy.run(gather_value))
    assert result.tolist() == [1, 2, 3] * strategy.num_replicas_in_sync
    assert result.dtype == np.int32


def test_all_gather_of_a_nest(strategy):
    def gather_nest():
        ctx = mpidist.get_replica_context()
        value_1 = np.array([1, 2, 3], np.int32)
        value_2 = np.array([[1, 2], [3, 4]], np.int32)
        return ctx.all_gather([value_1, value_2], axis=0)

    result = strategy.run(gather_nest)
    assert isinstance(result, list)
    first, second = local(strategy, result)
    n = strategy.num_replicas_in_sync
    assert first.tolist() == [1, 2, 3] * n
    assert second.tolist() == [[1, 2], [3, 4]] * n


def test_the_pages_device_lists(comm):
    binding = [f"CPU:{i}" for i in range(comm.size)]
    strategy = mpidist.MirroredStrategy(binding)
    assert strategy.num_replicas_in_sync == comm.size
    assert strategy.extended.device == binding[strategy.extended.topology.local_rank]
    strategy.experimental_finalize()


CLASSES = api_members.public_classes()
ENTRIES = api_members.entries(api_members.PAGES)
# As if the pages had all members
COMPLETE = set(CLASSES) | {
    f"{name}.{member}"
    for name, kind in CLASSES.items()
    for member, owner in api_members.members(kind).items()
    if owner is kind or name in ("mpidist.Mirrored", "mpidist.Variable")
}


def lacking(name, without=()):
    pages = COMPLETE - set(without)
    return api_members.missing(name, CLASSES[name], pages, ENTRIES)


def test_the_tables_of_the_reference_have_all_names():
    assert api_members.names_without_table(api_members.PAGES) == []
    for name in ENTRIES.keys() & CLASSES.keys():
        assert [text for text in lacking(name) if "the table" in text] == []


def test_the_strategy_that_one_creates_shows_what_it_inherits():
    names = {n for n in dir(mpidist.MirroredStrategy) if not n.startswith("_")}
    assert ENTRIES["mpidist.MirroredStrategy"].table == names


def test_what_the_reference_lacks_is_found():
    name = "mpidist.Strategy"
    assert lacking(name) == []
    gone = [f"{name}.barrier", "mpidist.TensorSpec.shape"]
    assert lacking(name, gone) == ["mpidist.Strategy.barrier is not on strategy.md"]
    found = lacking("mpidist.MirroredStrategy", gone)
    assert found == ["mpidist.MirroredStrategy.barrier is not on strategy.md"]
    found = lacking("mpidist.TensorSpec", gone)
    assert found == ["mpidist.TensorSpec.shape is not on datasets.md"]
    assert lacking("mpidist.Options", ["mpidist.Options"]) == [
        "mpidist.Options has no entry"
    ]


@pytest.mark.slow
def test_the_reference_has_all_members(tmp_path, capsys):
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    docs = Path(__file__).parents[1] / "docs"
    command = [sys.executable, "-m", "sphinx", "-q", "-c", str(docs), "-b", "html"]
    ended = launching.run([*command, str(docs / "api"), str(tmp_path)])
    assert ended.returncode == 0, ended.stderr
    assert api_members.main(tmp_path) == 0, capsys.readouterr().out
