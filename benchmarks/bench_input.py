"""How fast rows of HDF5 files come, beside other ways to read them.

    python benchmarks/bench_input.py --output benchmarks/results/input-1rank.json
    mpirun -n 2 python benchmarks/bench_input.py --output .../input-2ranks.json

Rows are 3x32x32 bytes like pictures, in a temporary folder (on local disk; all of it
fits in the page cache, and every contestant goes through it once before it is timed,
its bytes being checked). Global batches of 256 rows come in random order. Ours is the
public interface:

    data = mpidist.Dataset.from_hdf5(path, "x").shuffle(seed=0).batch(256)
    for batch in strategy.experimental_distribute_dataset(data): ...

Ours and the others are timed in turn, whole epochs; ratios are medians of pairs. With
several ranks the others run on all ranks at the same time too, each on its share of the
rows and of the global batch, and without any communication: so a ratio always is all
rows by the time of the slowest rank, for both. A rank waiting for the others spins, in
MPI, and that counts as CPU time of ours. The machine should do nothing else.

Cases (see --cases), and what the ratio of ours has to be:

    contiguous  torch DataLoader over h5py (best of 0, 2, 4 workers),
                one row per call, and a sorted batch per call            >= 20
                np.take from a memory map into a buffer                  >= 0.7
    chunked     h5py, sorted fancy indexing                              >= 50
    gzip        h5py, whole batches in order, rows per CPU second        >= 1.4
    overlap     a step that computes as long as reading takes, with a
                spare core: the sum of both times                        <= 0.6
    memory      peak of reading 4 GB, beside that of a file of 100 MB    <= 1.1
"""

if __name__ == "__main__":
    # Not above: a DataLoader's workers import this file, and must not start MPI
    import input_cases

    input_cases.main(__doc__)
