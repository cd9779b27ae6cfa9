"""Files for another kind of processor: `portable_files.py write FOLDER`, or `read`.

Each by a job of its own, on any number of ranks, and any machine.
"""

import sys
from pathlib import Path

import ml_dtypes
import numpy as np

import mpidist
from mpidist.comm.transports.tuning import Layout, find_table, write_table

COUNT = 20_000  # values of an array; of the larger dtypes too many for the structure
DTYPES = ["?", "i1", ">i2", "i4", "u8", "f2", "f4", ">f8", "c8", "c16", "S1", "U3"]
LAYOUT = Layout("MPICH 5.0.2", (2,), "CPU")
TABLE = {name: [(0, "mpi")] for name in ("allreduce", "allgatherv", "broadcast")}


def arrays():
    """Return arrays by dtype, in which all bytes have all values that they may have."""
    made = {dtype: (np.arange(COUNT) % 251 - 120).astype(dtype) for dtype in DTYPES}
    made["bfloat16"] = made["f4"].astype(ml_dtypes.bfloat16)
    made["M8[s]"] = made["i4"].astype("i8").astype("M8[s]")
    made["record"] = made["i4"][:100].astype([("a", "i1"), ("b", "f8")])
    return made


def state(strategy, path, is_new):
    """Return a checkpoint, and the iterator and generator in it."""
    rows = mpidist.Dataset.from_hdf5(path, ["x", "y"]).shuffle(seed=3).batch(12)
    iterator = iter(strategy.experimental_distribute_dataset(rows))
    random = np.random.default_rng(5 if is_new else 6)
    if is_new:
        next(iterator)
        random.random(7)
    saved = arrays()
    if not is_new:
        saved = {name: np.zeros_like(array) for name, array in saved.items()}
    kept = {"arrays": saved, "n": 2**62 + 1 if is_new else 0}
    checkpoint = mpidist.Checkpoint(
        strategy=strategy, iterator=iterator, random=random, kept=kept
    )
    return checkpoint, iterator, random


def write(strategy, folder):
    """Write all files. Collective."""
    share = np.arange(strategy.rank, 60, strategy.size)
    with mpidist.Hdf5Writer(strategy, folder / "rows.h5", order="rank") as writer:
        writer.append({"x": share.astype("f4") / 7, "y": share.astype("S2")})
    checkpoint, _, _ = state(strategy, folder / "rows.h5", is_new=True)
    checkpoint.write(folder / "checkpoint")
    long = mpidist.Checkpoint(strategy=strategy, x=np.arange(10).astype("g") / 3)
    long.write(folder / "long")
    if strategy.is_first:
        digits = str(np.finfo("g").nmant)
        (folder / "digits").write_text(digits)
        write_table(folder / "table", LAYOUT, TABLE, {})
    strategy.barrier()


def read(strategy, folder):
    """Require that the files hold what `write` writes on this machine. Collective."""
    checkpoint, iterator, random = state(strategy, folder / "rows.h5", is_new=False)
    _, expected_iterator, expected_random = state(
        strategy, folder / "rows.h5", is_new=True
    )
    checkpoint.restore(folder / "checkpoint")
    for name, array in arrays().items():
        found = checkpoint.kept["arrays"][name]
        assert (found.dtype, found.tobytes()) == (array.dtype, array.tobytes()), name
    assert checkpoint.kept["n"] == 2**62 + 1
    assert random.random() == expected_random.random()
    local = strategy.experimental_local_results
    for found, expected in zip(iterator, expected_iterator, strict=True):
        for a, b in zip(found, expected, strict=True):
            (a,), (b,) = local(a), local(b)
            assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())
    long, refused = mpidist.Checkpoint(strategy=strategy, x=np.zeros(10, "g")), ""
    try:
        long.restore(folder / "long")
    except mpidist.CheckpointError as error:
        refused = str(error)
    if int((folder / "digits").read_text()) == np.finfo("g").nmant:
        assert (long.x == np.arange(10).astype("g") / 3).all()
    else:
        assert "long double" in refused
        assert not long.x.any()
    assert find_table(folder / "table", LAYOUT) == TABLE


if __name__ == "__main__":
    strategy = mpidist.MirroredStrategy()
    {"write": write, "read": read}[sys.argv[1]](strategy, Path(sys.argv[2]))
    if strategy.is_first:
        print(sys.argv[1], "by", strategy.size, "ranks")
