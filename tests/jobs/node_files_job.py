"""A job whose nodes do not see the same files.

    node_files_job.py FOLDER KIND...

Each KIND is what it does with files in FOLDER. Rank 0 prints the error that all ranks
get, "[]" if there is none.
"""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np

import mpidist

FOLDER, KINDS = Path(sys.argv[1]), sys.argv[2:]
strategy = mpidist.MirroredStrategy(["CPU:0"])
with strategy.scope():
    w = mpidist.Variable(np.zeros((1000, 1000)))
checkpoint = mpidist.Checkpoint(w=w, shard_bytes=1000)


def read() -> None:
    dataset = mpidist.Dataset.from_hdf5([FOLDER / "data.h5"], ["x"]).batch(8)
    for _ in strategy.experimental_distribute_dataset(dataset):
        pass


def save() -> None:
    checkpoint.save(FOLDER / "run" / "ckpt")


def save_in_background() -> None:
    directory = FOLDER / "run"
    with mpidist.CheckpointManager(
        checkpoint, directory, 2, is_background=True
    ) as manager:
        manager.save()


def restore() -> None:
    manager = mpidist.CheckpointManager(checkpoint, FOLDER / "run", 2)
    assert manager.restore_or_initialize() is not None, "it begins anew"


def write() -> None:
    with mpidist.Hdf5Writer(strategy, FOLDER / "rows.h5") as writer:
        writer.append({"x": np.ones((3, 2))})


def read_rows() -> None:
    dataset = mpidist.Dataset.from_hdf5([FOLDER / "rows.h5"], ["x"]).batch(8)
    read = strategy.experimental_distribute_dataset(dataset)
    ones = [strategy.reduce("SUM", batch, axis=0) for batch in read]
    assert np.sum(ones) == 6 * strategy.num_replicas_in_sync, ones


def begin() -> None:
    """Look for what is not there yet, which file systems remember."""
    manager = mpidist.CheckpointManager(checkpoint, FOLDER / "run", 2)
    assert manager.restore_or_initialize() is None
    assert not (FOLDER / "rows.h5").exists()


def prepare() -> None:
    """Write what the others read."""
    save()
    if strategy.extended.replica_id == 0:
        with h5py.File(FOLDER / "data.h5", "w") as file:
            file["x"] = np.arange(30.0)


DO = {
    "begin": begin,
    "prepare": prepare,
    "read rows": read_rows,
    "read": read,
    "save": save,
    "save in background": save_in_background,
    "restore": restore,
    "write": write,
}
for kind in KINDS:
    error = ""
    try:
        DO[kind]()
    except mpidist.MpidistError as raised:
        error = f"{type(raised).__name__}: {raised}"
    errors = strategy.gather_objects(error)
    assert len({bool(each) for each in errors}) == 1, errors
    if strategy.extended.replica_id == 0:
        print(f"[{error}]", flush=True)
