"""The examples of the three TensorFlow pages that this library follows; the reference.

With two replicas the numbers are the pages'; with others, those that follow.
"""

import os
import shutil
import sys
import zlib
from pathlib import Path

import launching
import numpy as np
import pytest
from all_ranks import local

import mpidist

DOCS = Path(__file__).parents[1] / "docs"
sys.path.append(str(DOCS))

import public_names  # noqa: E402


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


def names_of(inventory):
    """Return the names in Sphinx's list of what is on the pages."""
    data = inventory.read_bytes()
    head = b"zlib.\n"
    lines = zlib.decompress(data[data.index(head) + len(head) :]).decode().splitlines()
    return {line.split()[0] for line in lines if " py:" in line}


def test_the_reference_lists_every_name():
    assert public_names.public_names().keys() <= public_names.listed()


def test_the_reference_leaves_out_what_exists():
    names = map(find_class, public_names.listed())
    classes = {base.__name__: base for kind in names for base in kind.__mro__}
    for name, members in public_names.INTERNAL.items():
        assert set(members.split()) <= set(dir(classes[name])), name


def find_class(name):
    module, _, name = name.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if isinstance(found, type) else type(None)


@pytest.mark.parametrize("name", public_names.public_names())
def test_members_are_those_that_python_lists(name):
    kind = public_names.public_names()[name]
    if isinstance(kind, type):
        shown = public_names.public_members(name)
        internal = " ".join(
            public_names.INTERNAL.get(base.__name__, "") for base in kind.__mro__
        )
        for member in {n for n in dir(kind) if n[0] != "_"} - {*internal.split()}:
            owner = next(base for base in kind.__mro__ if member in vars(base))
            assert (member in shown) == owner.__module__.startswith("mpidist"), member


@pytest.mark.slow
def test_the_reference_has_all_members(tmp_path):
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    docs = shutil.copytree(DOCS, tmp_path / "docs")
    build = [sys.executable, "-m", "sphinx", "-q", "-c", str(docs), "-b", "html"]
    folder = tmp_path / "built"
    path = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    ended = launching.run([*build, str(docs / "api"), str(folder)], PYTHONPATH=path)
    assert ended.returncode == 0, ended.stderr
    on_pages = names_of(folder / "objects.inv")
    for name, kind in public_names.public_names().items():
        members = public_names.public_members(name) if isinstance(kind, type) else ()
        assert {name, *(f"{name}.{member}" for member in members)} <= on_pages
