"""What some ranks save other numbers of ranks restore; large arrays lie in shards."""

import contextlib

import h5py
import numpy as np
import pytest
from all_ranks import on_root

import mpidist
from mpidist import CheckpointError
from mpidist import VariableAggregation as Aggregation
from mpidist import VariableSynchronization as Synchronization
from mpidist.checkpoint import save
from mpidist.checkpoint.save import cut, shard_count
from mpidist.util.files import AtomicFile

LARGE = (3, 70_000, 2)  # of which shards get parts that are no whole rows
SHARD = 1 << 20


@contextlib.contextmanager
def strategy_of(comm, ranks):
    """Give a strategy of the first `ranks` ranks on those, and None on the others."""
    part = comm.Split(0 if comm.rank < ranks else 1)
    strategy = mpidist.MirroredStrategy(communicator=part)
    yield strategy if comm.rank < ranks else None
    strategy.experimental_finalize()
    part.Free()
    comm.Barrier()


def counts(comm):
    return range(1, comm.size + 1)


def large(seed=0):
    return np.random.default_rng(seed).normal(size=LARGE)


class State:
    """What a checkpoint holds, on the ranks of one strategy."""

    def __init__(self, strategy, seed):
        rng = np.random.default_rng(seed)
        on_read = {"synchronization": Synchronization.ON_READ}
        with strategy.scope():
            self.w = mpidist.Variable(rng.normal(size=LARGE))
            self.b = mpidist.Variable(rng.normal(size=5).astype("f4"))
            self.total = mpidist.Variable(0, aggregation=Aggregation.SUM, **on_read)
            self.mean = mpidist.Variable(0.0, aggregation=Aggregation.MEAN, **on_read)
        self.total.assign(1000 + seed)
        self.mean.assign(0.5 + seed)
        self.momentum = [rng.normal(size=(400_000,)), rng.integers(9, size=(2, 3))]
        self.text = np.array(["some", "text", str(seed)] * 100_000)
        self.rng = np.random.default_rng(seed)
        rows = mpidist.Dataset.range(60).shuffle(seed=3).batch(12)
        self.batches = strategy.experimental_distribute_dataset(rows)
        self.iterator = iter(self.batches)
        self.checkpoint = mpidist.Checkpoint(
            shard_bytes=SHARD,
            variables={"w": self.w, "b": self.b, "t": self.total, "m": self.mean},
            momentum=self.momentum,
            text=self.text,
            rng=self.rng,
            iterator=self.iterator,
            step=seed,
        )

    def require_like(self, seed):
        rng = np.random.default_rng(seed)
        np.testing.assert_array_equal(self.w.numpy(), rng.normal(size=LARGE))
        expected = rng.normal(size=5).astype("f4")
        np.testing.assert_array_equal(self.b.numpy(), expected)
        np.testing.assert_array_equal(self.momentum[0], rng.normal(size=400_000))
        np.testing.assert_array_equal(self.momentum[1], rng.integers(9, size=(2, 3)))
        assert (int(self.total), float(self.mean)) == (1000 + seed, 0.5 + seed)
        assert self.text.tolist()[:3] == ["some", "text", str(seed)]
        assert self.text[-1] == str(seed)
        assert self.rng.normal() == np.random.default_rng(seed).normal()
        assert self.checkpoint.step == seed


def test_any_number_of_ranks_restores_what_another_saved(comm, mpi_tmp_path):
    for savers in counts(comm):
        path = mpi_tmp_path / f"by{savers}"
        with strategy_of(comm, savers) as strategy:
            if strategy is not None:
                state = State(strategy, 1)
                next(state.iterator)
                state.checkpoint.write(path)
        shards = len(list(mpi_tmp_path.glob(f"by{savers}-*.h5")))
        assert shards == (savers if savers > 1 else 0)
        with h5py.File(path.with_suffix(".h5")) as file:
            expected = np.random.default_rng(1).normal(size=LARGE)
            np.testing.assert_array_equal(file["variables/w"], expected)
        for restoring in counts(comm):
            with strategy_of(comm, restoring) as strategy:
                if strategy is not None:
                    state = State(strategy, 2)
                    state.checkpoint.restore(path).assert_consumed()
                    state.require_like(1)
                    assert state.iterator.get_state()["step"] == 1
                    rest = [strategy.reduce("SUM", b, axis=0) for b in state.iterator]
                    assert len(rest) == 4


def test_each_ranks_own_values_need_the_same_number_of_ranks(comm, mpi_tmp_path):
    n = comm.size
    for shard_bytes in (1, 1 << 30):
        path = mpi_tmp_path / f"own{shard_bytes}"
        with strategy_of(comm, n) as strategy:
            x = np.full((200_000, comm.rank + 1), float(comm.rank))
            own = mpidist.PerReplica(({"x": x},), (comm.rank,))
            checkpoint = mpidist.Checkpoint(
                strategy=strategy, shard_bytes=shard_bytes, deep={"own": own}
            )
            checkpoint.write(path)
            x[...] = -1
            checkpoint.restore(path)
            assert (x == comm.rank).all()
            with h5py.File(f"{path}.h5") as file:
                assert [file[f"deep/own/{r}/x"].shape[1] for r in range(n)] == list(
                    range(1, n + 1)
                )
        with strategy_of(comm, max(1, n - 1)) as strategy:
            if strategy is not None and n > 1:
                checkpoint = mpidist.Checkpoint(strategy=strategy, deep={"own": own})
                with pytest.raises(CheckpointError, match=f"'deep/own'.*{n} ranks"):
                    checkpoint.restore(path)


@pytest.mark.parametrize("kind", ["Generator", "RandomState"])
def test_generators_at_another_number_of_ranks(comm, mpi_tmp_path, kind):
    """Ranks that were there go on; each new rank gets numbers of its own."""
    make = {"Generator": np.random.default_rng, "RandomState": np.random.RandomState}
    draws = {}
    for savers in counts(comm):
        path = mpi_tmp_path / f"{kind}{savers}"
        with strategy_of(comm, savers) as strategy:
            if strategy is not None:
                rng = make[kind](100 + comm.rank)
                mpidist.Checkpoint(strategy=strategy, rng=rng).write(path)
        for restoring in counts(comm):
            with strategy_of(comm, restoring) as strategy:
                drawn = None
                if strategy is not None:
                    rng = make[kind](5)
                    mpidist.Checkpoint(strategy=strategy, rng=rng).restore(path)
                    drawn = rng.normal()
                draws[savers, restoring] = comm.allgather(drawn)[:restoring]
    for (savers, restoring), drawn in draws.items():
        if savers == 1:  # the one state is that of all
            assert drawn == [make[kind](100).normal()] * restoring
            continue
        kept = min(savers, restoring)
        assert drawn[:kept] == [make[kind](100 + r).normal() for r in range(kept)]
        assert len(set(drawn)) == restoring
        longest = draws[savers, comm.size]
        assert drawn == longest[:restoring]  # the same for the same states


@pytest.mark.mpi(min_size=2)
def test_a_lost_or_foreign_shard_is_an_error(comm, strategy, mpi_tmp_path):
    w = large()
    checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=SHARD, w=w)
    path = checkpoint.write(mpi_tmp_path / "x")
    other = checkpoint.write(mpi_tmp_path / "y")
    (shard,) = mpi_tmp_path.glob("x-*-00001-of-*.h5")
    (foreign,) = mpi_tmp_path.glob("y-*-00000-of-*.h5")
    on_root(comm, shard.rename, mpi_tmp_path / "kept")
    with pytest.raises(CheckpointError, match=f"{shard.name}: there is no such file"):
        checkpoint.restore(path)
    on_root(comm, foreign.rename, shard)
    with pytest.raises(CheckpointError, match="belongs to another checkpoint"):
        checkpoint.restore(path)
    with pytest.raises(CheckpointError, match="no such file"):
        checkpoint.restore(other)
    np.testing.assert_array_equal(w, large())


@pytest.mark.mpi(min_size=2)
def test_a_folder_that_is_not_shared_is_an_error(
    comm, strategy, mpi_tmp_path, monkeypatch
):
    """Rank 0 looks for the shards of others until it must see them."""
    monkeypatch.setattr(save, "VISIBLE_SECONDS", 0.1)
    publish = AtomicFile.publish
    if comm.rank == 1:  # as if it were on the disk of another node
        monkeypatch.setattr(AtomicFile, "publish", AtomicFile.discard)
    for is_background in (False, True):
        checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=SHARD, w=large())
        manager = mpidist.CheckpointManager(
            checkpoint, mpi_tmp_path, 1, is_background=is_background
        )
        with pytest.raises(CheckpointError, match=r"does not see .*-00001-of"):
            manager.save()
            manager.wait()
        comm.Barrier()
        assert not list(mpi_tmp_path.iterdir())
        comm.Barrier()
    monkeypatch.setattr(AtomicFile, "publish", publish)
    manager.save()
    manager.wait()
    assert manager.latest_checkpoint is not None


def test_shards_of_a_former_saving_are_removed(comm, strategy, mpi_tmp_path):
    w = large()
    checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=SHARD, w=w)
    for _ in range(3):
        checkpoint.write(mpi_tmp_path / "x")
        checkpoint.write(mpi_tmp_path / "x-1")
    comm.Barrier()
    shards = min(comm.size, w.nbytes // SHARD)
    files = len(list(mpi_tmp_path.iterdir()))
    assert files == 2 * (1 + (shards if shards > 1 else 0))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("shard_bytes", [1 << 20, 1 << 30])
@pytest.mark.parametrize("order", ["C", "F"])
def test_one_element_of_one_rank_is_a_mismatch(
    comm, strategy, mpi_tmp_path, shard_bytes, order
):
    w = np.asarray(large(), order=order)
    checkpoint = mpidist.Checkpoint(strategy=strategy, shard_bytes=shard_bytes, w=w)
    path = checkpoint.write(mpi_tmp_path / "x")
    for place in [(0, 0, 1), (0, 45_678, 0), (1, 69_999, 1), (2, 69_999, 1)]:
        for culprit in (0, comm.size - 1):
            w[...] = large()
            w[place] += comm.rank == culprit
            with pytest.raises(mpidist.MismatchError, match="'w'"):
                checkpoint.write(mpi_tmp_path / "x")
    w.reshape(-1, order="A")[1::2] += comm.rank  # a quarter of the bytes, and more
    with pytest.raises(mpidist.MismatchError, match="'w'"):
        checkpoint.write(mpi_tmp_path / "x")
    checkpoint.restore(path)
    np.testing.assert_array_equal(w, large())


def test_shards_have_about_the_same_size():
    assert shard_count(10 << 30, 1 << 30, 4) == 4
    assert shard_count(10 << 30, 3 << 30, 4) == 3
    assert shard_count(100, 1, 4) == 1
    sizes = [(1 << 20, 8), (3, 1 << 20), (1 << 22, 2)]
    cuts = cut(sizes, 4)
    for (count, _), edges in zip(sizes, cuts, strict=True):
        assert edges[0] == 0
        assert edges[-1] == count
        assert edges == sorted(edges)
    shards = [
        sum((edges[s + 1] - edges[s]) * item for (_, item), edges in zip(sizes, cuts))
        for s in range(4)
    ]
    assert max(shards) < 1.4 * min(shards)
