"""Random orders of rows in chunks: permutations that keep chunks together."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from mpidist import Dataset
from mpidist.data.map_dataset import Epoch
from mpidist.data.shuffling import ChunkShuffle
from mpidist.hdf5.chunks import ChunkLayout
from mpidist.util.shares import BatchShare


def every(order, rows):
    return order(np.arange(rows))


@pytest.mark.parametrize("window", [1, 4, 15])
def test_rows_of_a_window_without_stripes_come_from_as_many_chunks(window):
    layout = ChunkLayout((1600,), 10, 8, is_costly=True)
    found = every(ChunkShuffle(layout, window, 0, 0), 1500) // 10
    for start in range(0, 1500, window * 10):
        chunks = found[start : start + window * 10]
        assert len(set(chunks.tolist())) == window
        if window > 1:
            assert (np.diff(chunks) != 0).mean() > 0.3  # mixed, not one by one


@pytest.mark.parametrize(("batch", "rows_mixed"), [(32, 8), (256, 64), (512, 128)])
def test_a_batch_mixes_many_chunks(batch, rows_mixed):
    layout = ChunkLayout((200_000,), 100, 8, is_costly=True)
    order = ChunkShuffle(layout, layout.default_block_chunks, 0, 0)
    found = every(order, 200_000) // 100
    counts = [len(set(found[i : i + batch])) for i in range(0, 150_000, batch)]
    assert np.mean(counts) > 0.8 * rows_mixed


@pytest.mark.parametrize(
    ("replicas", "batch"),
    [(1, 256), (2, 256), (4, 256), (8, 256), (2, 64), (3, 192), (6, 384), (16, 512)],
)
def test_replicas_decode_few_chunks_twice(replicas, batch):
    """Each keeps what it used in the last turns; together they read most once."""
    rows, in_chunk = 100_000, 128
    layout = ChunkLayout((rows,), in_chunk, 3072, is_costly=True)
    order = ChunkShuffle(layout, layout.default_block_chunks, 0, 0)
    decoded, most = 0, 0
    for replica in range(replicas):
        last_use: dict[int, int] = {}
        for step, start in enumerate(range(0, rows, batch)):
            mine = BatchShare(replicas, replica).of(min(batch, rows - start))
            chunks = set((order(np.arange(batch)[mine] + start) // in_chunk).tolist())
            decoded += len(chunks - set(last_use))
            last_use |= dict.fromkeys(chunks, step)
            kept = step - 6 * order.turn // batch
            last_use = {c: s for c, s in last_use.items() if s > kept}
            most = max(most, len(last_use))
    assert decoded < 1.1 * rows / in_chunk
    assert most <= 2 * order.stripes * order.block_chunks / replicas + 8


def test_a_huge_dataset_needs_no_table():
    layout = ChunkLayout((10**10, 7, 10**12 + 1), 128, 3072, is_costly=True)
    order = ChunkShuffle(layout, 384, 3, 1)
    length = sum(layout.lengths)
    positions = np.concatenate([np.arange(1000), length - 1 - np.arange(1000)])
    found = order(positions)
    assert len(set(found.tolist())) == 2000
    assert found.min() >= 0
    assert found.max() < length


@pytest.mark.parametrize(
    ("rows", "row_bytes", "window"),
    [(128, 3072, 384), (1, 1, 384), (1000, 100_000, 2), (1000, 10**6, 1)],
)
def test_the_default_window_is_limited_in_chunks_and_bytes(rows, row_bytes, window):
    assert ChunkLayout((10,), rows, row_bytes, True).default_block_chunks == window


@pytest.fixture
def path(comm, mpi_tmp_path):
    path = mpi_tmp_path / "a.h5"
    if comm.rank == 0:
        with h5py.File(path, "w") as file:
            data = np.arange(1003)
            file.create_dataset("x", data=data, chunks=(10,), compression="gzip")
            file["y"] = data
    comm.Barrier()
    return path


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize("window", [None, 0, 1, 5])
@pytest.mark.parametrize("drop", [False, True])
def test_datasets_divided_over_replicas(strategy, path, name, window, drop):
    """The same batches for any number of replicas, every row once."""
    rows = Dataset.from_hdf5(path, name).shuffle(seed=2, window_chunks=window)
    dataset = rows.batch(50, drop_remainder=drop)
    alone = [batch.tolist() for batch in dataset]
    once = [row for batch in alone for row in batch]
    assert len(once) == len(set(once)) == (1000 if drop else 1003)
    divided = strategy.experimental_distribute_dataset(dataset)
    found = [strategy.gather(batch, axis=0).tolist() for batch in divided]
    assert found == alone
    for replicas in (3, 7):
        parts = [
            dataset.pipeline.local_batch(Epoch(0), 4, BatchShare(replicas, r))
            for r in range(replicas)
        ]
        assert np.concatenate(parts).tolist() == alone[4]


@pytest.mark.slow
def test_large_compressed_datasets_are_mixed_by_chunk(tmp_path, monkeypatch):
    from mpidist.hdf5 import read as hdf5_parts

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset(
            "x", data=np.arange(64_000), chunks=(10,), compression="gzip"
        )
    order = [int(x) for b in _shuffled(tmp_path) for x in b]
    assert len({x // 10 for x in order[:600]}) > 500  # kept decoded: any order
    monkeypatch.setattr(hdf5_parts, "KEPT_BYTES", 1000)
    order = [int(x) for b in _shuffled(tmp_path) for x in b]
    assert sorted(order) == list(range(64_000))
    assert len({x // 10 for x in order[:600]}) <= 20 * 2 * 8  # of 600 / 32 stripes


def _shuffled(folder):
    return Dataset.from_hdf5(folder / "a.h5", "x").shuffle(seed=0).batch(20)


def test_a_negative_window_is_refused():
    with pytest.raises(ValueError, match="window_chunks must be >= 0, not -1"):
        Dataset.range(3).shuffle(window_chunks=-1)
