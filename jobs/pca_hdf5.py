"""Find mean, covariance and principal components of HDF5 rows, in one pass.

Each rank streams its part of every batch and keeps only the count, the mean and the
scatter matrix of its rows, so memory is `batch / ranks` rows and a few
matrices `(features, features)`, however large the files are. The sums are made on the
CPU, in float64. The number of ranks affects the results only by rounding.

A row `(*shape)` is flattened to features. With `--scores` a second pass projects all
rows, in the order of the files. Results are the datasets `mean`, `covariance`,
`components`, `explained_variance` and `scores` of one HDF5 file, which appears
complete or not at all. Run it on any number of processes, each with as many BLAS
threads as it has cores (too many slow it down a hundredfold)::

    export OMP_NUM_THREADS=1
    mpirun -n 4 python jobs/pca_hdf5.py run1.h5 run2.h5 --dataset images \
        --components 8 --batch 4096 --scores --output pca.h5
    srun -n 64 python jobs/pca_hdf5.py run*.h5 --dataset images \
        --components 8 --batch 65536 --output pca.h5
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np
import numpy.typing as npt
from tqdm import tqdm

import mpidist

__all__ = ["Components", "Moments", "ResultFile", "main", "run"]

Array = npt.NDArray[np.float64]

_ON_HOST = mpidist.InputOptions(experimental_fetch_to_device=False)
# Entries of a component that differ by less than this ratio count as equally large
_TIE = 1 - 1e-3


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean and scatter matrix of some rows.

    Args:
      count: how many rows.
      mean: `(features,)`, zeros where there are no rows.
      scatter: `(features, features)`, the sum of outer(row - mean, row - mean).
    """

    count: int
    mean: Array
    scatter: Array

    @classmethod
    def of(cls, rows: Array) -> Moments:
        """Return the moments of `(rows, features)`, which may have no rows."""
        count, features = rows.shape
        if count == 0:
            return cls(0, np.zeros(features), np.zeros((features, features)))
        mean = rows.mean(axis=0)
        centred = rows - mean
        return cls(count, mean, centred.T @ centred)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of the rows of both.

        The pairwise update of Chan, Golub and LeVeque, "Updating formulae and a
        pairwise algorithm for computing sample variances", Stanford STAN-CS-79-773,
        1979. Unlike E[x x'] - E[x] E[x'], it never subtracts large, nearly equal
        numbers.
        """
        if other.count == 0:
            return self
        count = self.count + other.count
        step = other.mean - self.mean
        between = self.count * other.count / count * np.outer(step, step)
        mean = self.mean + other.count / count * step
        return Moments(count, mean, self.scatter + other.scatter + between)

    def over_all_ranks(self, strategy: mpidist.Strategy) -> Moments:
        """Return the moments of the rows of all ranks, on every rank. Collective.

        The same update, for all groups at once: what one group adds to the common
        scatter is its own and count * outer(d, d), where d leads from the common mean
        to its mean. A rank may have no rows; some rank must have one.
        """
        mine = (np.array(self.count), self.count * self.mean)
        count, total = strategy.reduce("SUM", mine)
        mean = total / count
        d = self.mean - mean
        scatter = self.scatter + self.count * np.outer(d, d)
        return Moments(int(count), mean, strategy.reduce("SUM", scatter))


@dataclasses.dataclass(frozen=True)
class Components:
    """The leading principal components.

    Args:
      directions: `(k, features)`, orthonormal, that of the largest variance first.
      variances: `(k,)`, of the rows along each direction, over rows - 1.
      explained: the ratio of these to all variance; nan where rows do not vary.
    """

    directions: Array
    variances: Array
    explained: float

    @classmethod
    def of(cls, covariance: Array, k: int) -> Components:
        """Return the `k` leading components of `covariance (features, features)`."""
        values, vectors = np.linalg.eigh(covariance)
        variances = np.maximum(values[::-1][:k], 0.0)
        total = float(np.trace(covariance))
        explained = float(variances.sum()) / total if total > 0 else float("nan")
        directions = _fix_signs(vectors.T[::-1][:k])
        return cls(directions, variances, explained)


def _fix_signs(directions: Array) -> Array:
    """Return the rows, turned so that the largest entry of each is positive.

    Of several entries that are equally large up to rounding the first decides, since
    rounding differs with the number of ranks.
    """
    sizes = np.abs(directions)
    largest = sizes >= _TIE * sizes.max(axis=1, keepdims=True)
    deciding = largest.argmax(axis=1)[:, np.newaxis]
    signs = np.sign(np.take_along_axis(directions, deciding, axis=1))
    return np.ascontiguousarray(directions * signs)


class ResultFile:
    """An HDF5 file that appears at `path` complete, or not at all.

    Rank 0 calls its methods, through `Consensus.root_only`; the other ranks' objects
    do nothing. Used with `with`, which removes what was not published.
    """

    def __init__(self, path: Path):
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file: h5py.File | None = None
        self._scores: h5py.Dataset | None = None
        self._scored = 0

    def create(self, inputs: Sequence[str]) -> None:
        """Open a temporary file in the same folder.

        Raises:
          ArgumentError: the folder does not exist; the path is a folder or an input.
        """
        folder = self._path.parent
        if not folder.is_dir():
            raise mpidist.ArgumentError(
                f"--output {self._path}: there is no folder {folder}; create it first"
            )
        if self._path.is_dir():
            raise mpidist.ArgumentError(
                f"--output {self._path} is a folder; name a file"
            )
        if any(_is_same_file(self._path, file) for file in inputs):
            raise mpidist.ArgumentError(
                f"--output {self._path} is one of the input files; name another"
            )
        self._file = h5py.File(self._temporary, "w", locking=False)

    def write(self, mean: Array, covariance: Array, components: Components) -> None:
        """Write everything but the scores."""
        assert self._file is not None
        self._file["mean"] = mean
        self._file["covariance"] = covariance
        self._file["components"] = components.directions
        self._file["explained_variance"] = components.variances

    def reserve_scores(self, shape: tuple[int, int]) -> None:
        """Make room for all scores, `(rows, k)`."""
        assert self._file is not None
        self._scores = self._file.create_dataset("scores", shape, np.float64)

    def append_scores(self, scores: Array) -> None:
        """Write the next scores, `(rows, k)`."""
        assert self._scores is not None
        stop = self._scored + len(scores)
        self._scores[self._scored : stop] = scores
        self._scored = stop

    def publish(self) -> None:
        """Bring the file to disk, then to its path, in place of an older one."""
        assert self._file is not None
        self._file.flush()
        self._file.close()
        with open(self._temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary, self._path)
        self._file = None

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            try:
                self._file.close()
            finally:
                self._temporary.unlink(missing_ok=True)


def _is_same_file(path: Path, other: str) -> bool:
    return path.exists() and os.path.exists(other) and os.path.samefile(path, other)


def as_features(rows: npt.NDArray[np.generic], origin: Array | None = None) -> Array:
    """Return `(rows, *shape)` as float64 `(rows, features)`, less `origin`.

    Raises:
      DataError: they are not real numbers, or not finite.
    """
    if rows.dtype.kind not in "biuf":
        raise mpidist.DataError(f"rows of real numbers are needed, not {rows.dtype}")
    features = rows.reshape(len(rows), -1).astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(features).all(axis=0))
    if bad.size:
        raise mpidist.DataError(
            f"features {bad[:8].tolist()} have values that are nan or infinite; leave "
            "such rows out of the files first"
        )
    return features if origin is None else features - origin


def read_origin(strategy: mpidist.Strategy, rows: mpidist.Dataset, k: int) -> Array:
    """Return the first row `(features,)`, on every rank. Collective.

    All sums are made of rows less this one: where values are large and vary little,
    that keeps the digits in which they vary (Chan, Golub and LeVeque, "Algorithms for
    computing the sample variance", The American Statistician 37, 1983).

    Raises, on all ranks:
      DataError: the files cannot be read, or have less than two rows.
      ArgumentError: the rows do not have `k` components.
    """
    first = rows.take(1).batch(1).map(as_features)
    batches = strategy.experimental_distribute_dataset(first, _ON_HOST)
    if len(rows) < 2:
        raise mpidist.DataError(f"a covariance needs two rows; there are {len(rows)}")
    origins: list[Array] = [strategy.gather(batch, axis=0)[0] for batch in batches]
    (origin,) = origins
    most = min(len(rows) - 1, origin.size)
    if k > most:
        raise mpidist.ArgumentError(
            f"--components {k} is too many: {len(rows)} rows of {origin.size} features "
            f"have {most}"
        )
    return origin


def local_batches(
    strategy: mpidist.Strategy, batches: mpidist.DistributedDataset, title: str
) -> Iterator[Array]:
    """Yield this rank's rows of each batch; every step is collective."""
    is_quiet = not strategy.is_first
    own_rows = mpidist.as_arrays(batches)
    yield from tqdm(own_rows, desc=title, unit="batch", disable=is_quiet)


def find_moments(
    strategy: mpidist.Strategy, batches: mpidist.DistributedDataset, features: int
) -> Moments:
    """Return the moments of all rows, on every rank. Collective."""
    moments = Moments.of(np.empty((0, features)))
    for rows in local_batches(strategy, batches, "moments"):
        moments = moments.merge(Moments.of(rows))
    return moments.over_all_ranks(strategy)


def write_scores(
    strategy: mpidist.Strategy,
    output: ResultFile,
    batches: mpidist.DistributedDataset,
    moments: Moments,
    components: Components,
) -> None:
    """Project all rows and write their scores, batch by batch. Collective.

    The ranks have consecutive slices of a batch, so rows stay in the files' order.
    """
    on_root = strategy.extended.consensus.root_only
    basis = components.directions.T
    shape = moments.count, basis.shape[1]
    on_root("reserve scores", lambda: output.reserve_scores(shape))
    for rows in local_batches(strategy, batches, "scores"):
        scores = strategy.gather((rows - moments.mean) @ basis, axis=0)
        on_root("write scores", functools.partial(output.append_scores, scores))


def run(strategy: mpidist.Strategy, options: argparse.Namespace) -> str:
    """Run the job, and return a line that describes it. Collective.

    Raises, on all ranks:
      ArgumentError: an output that cannot be written; too many components.
      DataError: files that cannot be read.
    """
    on_root = strategy.extended.consensus.root_only
    k = options.components
    with ResultFile(Path(options.output)) as output:
        on_root("create the output", lambda: output.create(options.files))
        rows = mpidist.Dataset.from_hdf5(options.files, options.dataset)
        origin = read_origin(strategy, rows, k)
        near_zero = functools.partial(as_features, origin=origin)
        batches = strategy.experimental_distribute_dataset(
            rows.batch(options.batch).map(near_zero), _ON_HOST
        )
        found = find_moments(strategy, batches, origin.size)
        mean, covariance = origin + found.mean, found.scatter / (found.count - 1)

        # One rank decides directions and signs, since processors may round differently
        components = on_root("components", lambda: Components.of(covariance, k))
        on_root("write", lambda: output.write(mean, covariance, components))
        if options.scores:
            write_scores(strategy, output, batches, found, components)
        on_root("publish the output", output.publish)
    return (
        f"rows={found.count} features={origin.size} components={k} "
        f"explained={components.explained:.4f} ranks={strategy.size}"
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line; exit on every rank if they are wrong."""
    parser = argparse.ArgumentParser(
        description="Principal components of HDF5 rows, in one pass, on all MPI ranks."
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILES", help="HDF5 files, in this order")
    add("--dataset", required=True, help="name of the dataset (rows, *shape)")
    add("--components", type=_positive, default=2, help="how many (default: 2)")
    add("--batch", type=_positive, default=8192, help="rows per step, of all ranks")
    add("--scores", action="store_true", help="project all rows, in a second pass")
    add("--output", required=True, help="HDF5 file to write, replaced if it exists")
    add("--device", default="CPU:0", help="the ranks' device (default: CPU:0)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, not {number}")
    return number


def main(
    arguments: Sequence[str] | None = None, strategy: mpidist.Strategy | None = None
) -> None:
    """Run the job with the options of the command line. Collective.

    Args:
      arguments: those after the program's name; None takes the process's own.
      strategy: the ranks that take part, instead of all, on the strategy's own device.
    """
    options = parse(arguments)
    if strategy is None:
        strategy = mpidist.MirroredStrategy([options.device])
    line = run(strategy, options)
    if strategy.is_first:
        print(line, flush=True)


if __name__ == "__main__":
    main()
