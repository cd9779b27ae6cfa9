"""Statistics of all ranks' rows: NumPy and SciPy's definitions are the oracle."""

import math
import operator
import warnings
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist.errors import (
    ArgumentError,
    ArgumentTypeError,
    ContextError,
    MismatchError,
)
from mpidist.statistics import ConfusionMatrix, Histogram, Moments, Quantiles

pytestmark = [pytest.mark.comm, pytest.mark.mpi]


def share(rows, comm):
    """Return rows of this rank; their numbers differ."""
    cuts = np.linspace(0, len(rows), comm.size + 1).astype(int)
    cuts = cuts**2 // max(1, len(rows))
    return rows[cuts[comm.rank] : cuts[comm.rank + 1]]


def exact_moments(column, ddof):
    exact = [Fraction(number) for number in column]
    mean = sum(exact) / len(exact)
    variance = sum((number - mean) ** 2 for number in exact) / (len(exact) - ddof)
    return float(mean), float(variance)


def rows_of(dtype, count=40):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(count, 2, 3)) * 100 + 1e4 * (np.dtype(dtype).itemsize > 2)
    if dtype == "bool":
        return rows > 0
    if np.dtype(dtype).kind == "u":
        rows = np.abs(rows)
    return rows.astype(dtype)


DTYPES = ["f8", "f4", "f2", ml_dtypes.bfloat16, "i8", "u8", "i4", "u1", "bool"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ddof", [0, 1])
def test_moments_are_exact(comm, strategy, dtype, ddof):
    rows = rows_of(dtype)
    moments = Moments(ddof, strategy)
    for batch in np.array_split(share(rows, comm), 3):
        moments.update_state(batch)
    found = moments.result()
    assert found.count == len(rows)
    flat = rows.reshape(len(rows), -1).astype("f8" if rows.dtype.kind in "fV" else "O")
    expected = [exact_moments(column, ddof) for column in flat.T.tolist()]
    assert found.mean.ravel().tolist() == [mean for mean, _ in expected]
    assert found.variance.ravel().tolist() == [variance for _, variance in expected]
    np.testing.assert_array_equal(found.std, np.sqrt(found.variance))
    assert found.minimum.dtype == found.maximum.dtype == rows.dtype
    np.testing.assert_array_equal(found.minimum, rows.min(axis=0))
    np.testing.assert_array_equal(found.maximum, rows.max(axis=0))
    if rows.dtype == np.float64:
        np.testing.assert_allclose(found.mean, rows.mean(axis=0), rtol=1e-13)
        np.testing.assert_allclose(
            found.variance, rows.var(axis=0, ddof=ddof), rtol=1e-9
        )


def test_large_integers_are_exact(comm, strategy):
    rows = np.array([[2**63 - 1, -(2**63)]] * 5 + [[-(2**62), 3]])
    found = strategy.statistics_of(share(rows, comm))
    for i, column in enumerate(rows.T.tolist()):
        assert (found.mean[i], found.variance[i]) == exact_moments(column, 0)
    assert found.minimum.tolist() == [-(2**62), -(2**63)]


def test_order_batches_and_merging_change_no_bit(comm, strategy):
    rows = (
        np.random.default_rng(1).normal(size=(300, 2)) * 10.0 ** np.arange(300)[:, None]
    )
    rows /= 1e100
    whole = strategy.statistics_of(rows if comm.rank == 0 else rows[:0])
    other = np.random.default_rng(2).permutation(rows)
    parts = [Moments(strategy=strategy) for _ in range(3)]
    for part, batch in zip(parts, np.array_split(share(other, comm), 3), strict=True):
        part.update_state(batch)
    parts[0].merge_state(parts[1:])
    found = parts[0].result()
    assert found.mean.tobytes() == whole.mean.tobytes()
    assert found.variance.tobytes() == whole.variance.tobytes()


def test_numbers_that_are_not_finite(comm, strategy):
    rows = np.zeros((2, 6))
    rows[1] = [np.nan, np.inf, -np.inf, 1, np.inf, np.nan]
    rows[0, 4:] = -np.inf, np.inf
    found = strategy.statistics_of(share(rows, comm))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(found.mean, rows.mean(axis=0))
        np.testing.assert_array_equal(found.variance, rows.var(axis=0))
    np.testing.assert_array_equal(found.minimum, rows.min(axis=0))
    np.testing.assert_array_equal(found.maximum, rows.max(axis=0))


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [[-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0]])
def test_the_order_of_zeros_does_not_matter(comm, strategy, dtype, rows):
    """Nor which rank has them, or in which update they come."""
    rows = np.array(rows, dtype)
    for parts in ([rows], [rows[:1], rows[1:]], [rows[comm.rank % 2 :][:1]]):
        moments = Moments(strategy=strategy)
        for part in parts:
            moments.update_state(part)
        found = moments.result()
        for number in (found.minimum, found.maximum, found.mean):
            assert number == 0
            assert not np.signbit(number)


def test_nan_has_the_same_bits_wherever_it_comes_from(comm, strategy):
    others = np.array([0xFFF8000000000001, 0x7FF8000000000002], "u8").view("f8")
    moments = Moments(strategy=strategy)
    moments.update_state(np.roll(others, comm.rank))
    found = moments.result()
    bits = {number.tobytes() for number in (found.minimum, found.maximum, found.mean)}
    assert bits == {np.float64(np.nan).tobytes()}


def test_without_rows(comm, strategy):
    found = Moments(strategy=strategy).result()
    assert (found.count, np.isnan(found.mean)) == (0, True)
    found = strategy.statistics_of(np.zeros((0, 3), "i4"))
    assert found.count == 0
    assert np.isnan([found.mean, found.variance, found.minimum, found.maximum]).all()
    with strategy.scope():
        one = Moments(1)
    one.update_state(np.ones((1 - bool(comm.rank), 2)))
    assert np.isnan(one.result().variance).all()
    assert one.result().mean.tolist() == [1, 1]


def test_a_distributed_dataset_and_per_replica_values(comm, strategy):
    rows = np.random.default_rng(0).normal(size=(25, 4)).astype("f4")
    data = mpidist.Dataset.from_tensor_slices(rows).shuffle(seed=0).batch(8)
    data = strategy.experimental_distribute_dataset(data)
    found = strategy.statistics_of(data, ddof=1)
    assert found.count == 25
    expected = [exact_moments(column, 1) for column in rows.T.tolist()]
    assert found.variance.tolist() == [variance for _, variance in expected]
    endless = mpidist.Dataset.range(4).batch(2).repeat()
    with pytest.raises(ArgumentError, match="no end"):
        strategy.statistics_of(strategy.experimental_distribute_dataset(endless))
    value = strategy.run(lambda: share(rows, comm))
    assert strategy.statistics_of(value).mean.tolist() == found.mean.tolist()
    one = strategy.statistics_of([1.0, 2.0])
    assert (float(one.mean), one.count) == (1.5, 2 * comm.size)


def test_in_replica_context(comm, strategy):
    moments = Moments(strategy=strategy)
    histogram = Histogram(2, (0, 2), strategy)

    def step(x):
        moments.update_state(x)
        histogram.update_state(x)
        return moments.result().mean, histogram.result().counts[0]

    mean, count = strategy.run(step, args=(np.array([[0.5], [2.0]]),))
    assert float(strategy.experimental_local_results(mean)[0][0]) == 1.25
    assert strategy.experimental_local_results(count)[0] == comm.size


@pytest.mark.parametrize("bins", [7, [-1.0, 0.0, 0.5, 3.0]], ids=["number", "edges"])
@pytest.mark.parametrize("dtype", ["f8", "f4", "i4"])
def test_histogram_is_numpys(comm, strategy, bins, dtype):
    rows = (np.random.default_rng(0).normal(size=200) * 2).astype(dtype)
    range_ = (-1, 3) if bins == 7 else None
    histogram = Histogram(bins, range_, strategy)
    for batch in np.array_split(share(rows, comm), 4):
        histogram.update_state(batch)
    if dtype != "i4" and comm.rank == 0:
        histogram.update_state([np.nan, np.inf])
    found = histogram.result()
    counts, edges = np.histogram(rows.astype("f8"), bins, range_)
    assert found.counts.tolist() == counts.tolist()
    assert found.edges.tolist() == edges.tolist()
    more = dtype != "i4"
    assert (found.below, found.above) == ((rows < -1).sum(), (rows > 3).sum() + more)
    assert found.nan == more


def test_histograms_need_bins(strategy):
    with pytest.raises(ArgumentError, match="needs a range"):
        Histogram(3, strategy=strategy)
    with pytest.raises(ArgumentError, match="monotonically"):
        Histogram([1, 0], strategy=strategy)


@pytest.mark.parametrize(
    ("bins", "range"),
    [
        ([0.0, math.nan, 1.0], None),
        ([math.nan, math.nan], None),
        ([0.0], None),
        ([], None),
        ([1.0, 0.0], None),
        ([[0.0, 1.0]], None),
        (["a", "b"], None),
        ([0, 1j], None),
        ([10**400, 10**401], None),
        (0, (0, 1)),
        ("auto", (0, 1)),
        (3, (0, math.nan)),
        (3, (-1e308, 1e308)),
        (10**15, (0, 1)),
    ],
)
def test_edges_that_make_no_bins(strategy, bins, range):
    with np.errstate(all="raise"), pytest.raises((ArgumentError, ArgumentTypeError)):
        Histogram(bins, range, strategy)


def test_equal_and_infinite_edges_are_numpys(comm, strategy):
    edges = [-math.inf, 0.0, 0.0, 1.0, math.inf]
    rows = np.array([-math.inf, -1.0, -0.0, 0.5, 1.0, math.inf, math.nan])
    histogram = Histogram(edges, strategy=strategy)
    with np.errstate(all="raise"):
        histogram.update_state(rows)
    found = histogram.result()
    assert found.counts.tolist() == (comm.size * np.histogram(rows, edges)[0]).tolist()
    assert (found.below, found.above, found.nan) == (0, 0, comm.size)


@pytest.mark.parametrize("q", ["a", None, 2, [0.5, "x"], math.nan])
def test_a_wrong_quantile_of_one_rank_is_an_error_on_all(comm, strategy, q):
    quantiles = Quantiles(strategy=strategy)
    quantiles.update_state([1.0])
    with pytest.raises(ArgumentError, match="q must be between 0 and 1"):
        quantiles.result(q if comm.rank == comm.size - 1 else 0.5)
    assert quantiles.result() == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("error", [0.01, 0.2, 1e-3])
def test_quantiles_are_as_near_as_they_say(comm, strategy, error):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=501) * 10.0 ** rng.integers(-3, 4, 501)
    rows[:20] = 0
    sketch = Quantiles(error, strategy)
    for batch in np.array_split(share(rows, comm), 4):
        sketch.update_state(batch)
    q = np.linspace(0, 1, 101)
    found = sketch.result(q)
    expected = np.quantile(rows, q, method="lower")
    np.testing.assert_allclose(found, expected, rtol=error * (1 + 1e-9))
    # In another order, on one rank, the same to the bit
    other = Quantiles(error, strategy)
    other.update_state(rng.permutation(rows)[: len(rows) if comm.rank == 0 else 0])
    assert other.result(q).tobytes() == found.tobytes()
    assert np.ndim(sketch.result()) == 0


def test_quantiles_of_numbers_without_logarithm(comm, strategy):
    sketch = Quantiles(strategy=strategy)
    assert np.isnan(sketch.result(0.5))
    if comm.rank == comm.size - 1:
        sketch.update_state([-np.inf, 0.0, 1e-310, np.inf])
        sketch.update_state(np.array([1e300, -1e300, 1e308]))
    found = sketch.result(np.arange(7) / 6)
    np.testing.assert_allclose(
        found, [-np.inf, -1e300, 0, 0, 1e300, np.inf, np.inf], rtol=0.01
    )
    if comm.rank == 0:
        sketch.update_state([np.nan])
    assert np.isnan(sketch.result(0.1))
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        sketch.result(1.5)


def missing_rows(rng, count=60):
    """Rows of a map of 2 x 3 cells with missing values; one cell has nothing else."""
    rows = 280 + 20 * rng.normal(size=(count, 2, 3))
    rows[rng.random(rows.shape) < 0.2] = np.nan
    rows[:, 1, 2] = np.nan
    return rows


@pytest.mark.parametrize("skip_nan", [False, True])
def test_quantiles_of_each_cell_of_a_map(comm, strategy, skip_nan):
    rows = missing_rows(np.random.default_rng(0))
    rows[:, 0, 0], rows[::2, 0, 1] = 7, -rows[::2, 0, 1]
    sketch = Quantiles(strategy=strategy, axis=0, skip_nan=skip_nan)
    for batch in np.array_split(share(rows, comm), 3):
        sketch.update_state(batch)
    q = [0, 0.3, 0.5, 1]
    found, quantile = sketch.result(q), np.nanquantile if skip_nan else np.quantile
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy: a cell has nan only
        expected = quantile(rows, q, axis=0, method="lower")
    np.testing.assert_allclose(found, expected, rtol=0.01)
    assert sketch.result().shape == (2, 3)
    other = Quantiles(strategy=strategy, axis=0, skip_nan=skip_nan)
    other.set_state(sketch.get_state())
    assert other.result(q).tobytes() == found.tobytes()
    with pytest.raises(ArgumentError, match="shape"):
        sketch.update_state(np.ones((2, 3, 2)))
    assert np.isnan(Quantiles(strategy=strategy, axis=0).result())


@pytest.mark.parametrize("dtype", ["f8", "f4", "f2"])
def test_missing_values_are_left_out(comm, strategy, dtype):
    rows = missing_rows(np.random.default_rng(0)).astype(dtype)
    rows[0, 0] = -np.inf, np.inf, np.nan
    found = strategy.statistics_of(share(rows, comm), 1, skip_nan=True)
    flat = rows.reshape(len(rows), -1).astype(float)
    flat = flat[:, [2, 3, 4]]
    expected = [exact_moments(column[~np.isnan(column)], 1) for column in flat.T]
    assert found.mean.ravel()[2:5].tolist() == [mean for mean, _ in expected]
    assert found.variance.ravel()[2:5].tolist() == [each for _, each in expected]
    assert found.mean.ravel()[:2].tolist() == [-np.inf, np.inf]
    assert np.isnan([found.mean[1, 2], found.minimum[1, 2], found.maximum[1, 2]]).all()
    assert found.count.tolist() == (~np.isnan(rows)).sum(axis=0).tolist()
    assert found.minimum.dtype == rows.dtype
    np.testing.assert_array_equal(found.minimum, np.fmin.reduce(rows))
    np.testing.assert_array_equal(found.maximum, np.fmax.reduce(rows))


@pytest.mark.parametrize("skip_nan", [False, True])
@pytest.mark.parametrize(
    "dtype", ["f8", "f4", ml_dtypes.bfloat16, "i4", "bool"], ids=str
)
def test_weighted_moments_are_exact(comm, strategy, mpi_tmp_path, dtype, skip_nan):
    rng = np.random.default_rng(3)
    rows = rows_of(dtype)
    if dtype == "f8":  # of all magnitudes
        rows *= 10.0 ** rng.integers(-250, 100, rows.shape)
        rows[:, 1, 1], rows[:5, 0, 0] = rng.normal(size=40) * 1e-310, np.nan
        rows[:, 1, 2] = rng.normal(size=40) * 1e150
    weights = np.cos(rng.uniform(-1.5, 1.5, len(rows))) * 2.0 ** rng.integers(-40, 40)
    weights[7] = 0
    made = Moments(strategy=strategy, skip_nan=skip_nan)
    pairs = (
        np.array_split(share(rows, comm), 3),
        np.array_split(share(weights, comm), 3),
    )
    for batch, part in zip(*pairs, strict=True):
        made.update_state(batch, sample_weight=part)
    found = made.result()
    flat = rows.reshape(len(rows), -1).astype(float)
    for i, column in enumerate(flat.T):
        kept = (weights > 0) & (~np.isnan(column) | (not skip_nan))
        mean, variance = math.nan, math.nan
        if not np.isnan(column[kept]).any():
            w, x = ([*map(Fraction, part[kept].tolist())] for part in (weights, column))
            exact = sum(map(operator.mul, w, x)) / sum(w)
            squares = sum(a * (b - exact) ** 2 for a, b in zip(w, x, strict=True))
            mean, variance = float(exact), float(squares / sum(w))
        np.testing.assert_array_equal(found.mean.ravel()[i], mean)
        np.testing.assert_array_equal(found.variance.ravel()[i], variance)
    path = mpidist.Checkpoint(strategy=strategy, made=made).write(mpi_tmp_path / "x")
    other = Moments(strategy=strategy, skip_nan=skip_nan)
    mpidist.Checkpoint(strategy=strategy, made=other).restore(path)
    other.merge_state([Moments(strategy=strategy, skip_nan=skip_nan)])
    assert other.result().mean.tobytes() == found.mean.tobytes()
    with pytest.raises(ArgumentError, match="earlier rows were"):
        made.update_state(rows)


@pytest.mark.parametrize(
    ("rows", "weights", "message"),
    [
        ([1.0, 2.0], [1.0], "shape"),
        ([1.0, 2.0], [1.0, -1.0], "sample_weight must be 0, or between"),
        ([1.0, 2.0], [1.0, np.nan], "sample_weight must be 0, or between"),
        ([1.0, 2.0], [1.0, 1e30], "sample_weight must be 0, or between"),
        ([1, 2**60], [1.0, 1.0], "integers up to"),
    ],
)
def test_weights_that_are_none(strategy, rows, weights, message):
    with pytest.raises(ArgumentError, match=message):
        Moments(strategy=strategy).update_state(rows, weights)


def test_confusion_matrix(comm, strategy):
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 4, (100, 2))
    matrix = ConfusionMatrix(5, strategy)
    matrix.update_state(*share(pairs, comm).T)
    matrix.update_state([], [])  # a rank without rows
    expected = np.zeros((5, 5), int)
    np.add.at(expected, tuple(pairs.T), 1)
    assert matrix.result().tolist() == expected.tolist()
    with pytest.raises(ArgumentError, match="between 0 and 5, but classes are 0"):
        matrix.update_state([0, 5], [0, 0])
    with pytest.raises(ArgumentError, match="shape"):
        matrix.update_state([0, 1], [0])
    with pytest.raises(ArgumentTypeError, match="integers"):
        matrix.update_state([0.5], [0])
    assert matrix.result().sum() == 100


def make_all(strategy):
    return {
        "moments": Moments(strategy=strategy),
        "empty": Moments(strategy=strategy),
        "histogram": Histogram(4, (-2, 2), strategy),
        "matrix": ConfusionMatrix(3, strategy),
        "quantiles": Quantiles(strategy=strategy),
    }


def test_saved_and_restored(comm, strategy, mpi_tmp_path):
    rows = np.random.default_rng(0).normal(size=(60, 2))
    made = make_all(strategy)
    for name in ("moments", "histogram", "quantiles"):
        made[name].update_state(share(rows[:30], comm))
    made["matrix"].update_state([comm.rank % 3], [1])
    path = mpidist.Checkpoint(**made).save(str(mpi_tmp_path / "ckpt"))
    again = make_all(strategy)
    again["moments"].update_state(rows)  # is forgotten
    mpidist.Checkpoint(**again).restore(path)
    for kept in (made, again):
        for name in ("moments", "histogram", "quantiles"):
            kept[name].update_state(share(rows[30:], comm))
    assert (
        again["moments"].result().mean.tolist()
        == made["moments"].result().mean.tolist()
    )
    mean = strategy.statistics_of(share(rows, comm)).mean
    assert again["moments"].result().mean.tolist() == mean.tolist()
    assert again["moments"].result().count == 60
    assert again["empty"].result().count == 0
    assert again["histogram"].result().counts.sum() == (np.abs(rows) <= 2).sum()
    assert again["matrix"].result().sum() == comm.size
    q = [0, 0.3, 1]
    assert again["quantiles"].result(q).tolist() == made["quantiles"].result(q).tolist()
    with pytest.raises(ArgumentError, match="3 classes"):
        other = {"matrix": ConfusionMatrix(4, strategy)}
        mpidist.Checkpoint(**other).restore(path, is_partial=True)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ_are_named(comm, strategy):
    moments = Moments(strategy=strategy)
    moments.update_state(np.zeros((2, 3 if comm.rank == 1 else 2)))
    with pytest.raises(MismatchError, match=r"rows float64\[3\] on rank 1"):
        moments.result()
    one = Moments(comm.rank, strategy)
    with pytest.raises(MismatchError, match=r"ddof=1\) without rows on rank 1"):
        one.result()
    # All go on afterwards
    assert strategy.statistics_of(np.ones((1, 1))).count == comm.size
    with pytest.raises(ArgumentTypeError, match="real numbers"):
        strategy.statistics_of(np.ones(2, complex if comm.rank else float))


def test_what_is_refused(strategy):
    moments = Moments(strategy=strategy)
    moments.update_state(np.zeros((2, 3)))
    with pytest.raises(ArgumentError, match=r"rows are float32\[3\], but earlier rows"):
        moments.update_state(np.zeros((2, 3), "f4"))
    with pytest.raises(ArgumentError, match="dimension for rows"):
        moments.update_state(1.0)
    with pytest.raises(ArgumentTypeError, match="real numbers"):
        moments.update_state(np.array(["a"]))
    with pytest.raises(ArgumentTypeError, match="real numbers, not"):
        moments.update_state(np.zeros((2, 3), np.longdouble))
    with pytest.raises(ArgumentTypeError, match="not a Moments"):
        moments.merge_state([ConfusionMatrix(2, strategy)])
    with pytest.raises(ArgumentError, match="does not match"):
        moments.merge_state([Moments(1, strategy)])
    with pytest.raises(ContextError, match="strategy=strategy"):
        Moments()
    with pytest.raises(ArgumentTypeError, match="must be a Strategy"):
        Moments(strategy=3)


@pytest.mark.parametrize("kind", [tuple, dict])
def test_a_dataset_of_several_arrays_has_statistics_of_each(comm, strategy, kind):
    x = np.random.default_rng(1).normal(size=(23, 3))
    y = np.arange(23)
    rows = (x, y) if kind is tuple else {"y": y, "x": x}
    dataset = mpidist.Dataset.from_tensor_slices(rows).shuffle(seed=1).batch(5)
    batches = strategy.experimental_distribute_dataset(dataset)
    for source in (batches, shares(rows, comm)):
        found = strategy.statistics_of(source, ddof=1)
        assert type(found) is kind
        of_x, of_y = found if kind is tuple else (found["x"], found["y"])
        assert of_x.count == of_y.count == 23
        np.testing.assert_allclose(of_x.mean, x.mean(axis=0), rtol=1e-15)
        np.testing.assert_allclose(of_x.variance, x.var(axis=0, ddof=1), rtol=1e-14)
        assert (of_y.mean, of_y.maximum) == (11, 22)


def shares(rows, comm):
    """This rank's part of several arrays; a dict in another order on each rank."""
    if isinstance(rows, tuple):
        return tuple([share(array, comm) for array in rows])
    names = sorted(rows, reverse=comm.rank % 2 == 1)
    return {name: share(rows[name], comm) for name in names}


@pytest.mark.mpi(min_size=2)
def test_other_structures_on_some_ranks_are_an_error(comm, strategy):
    rows = np.arange(4.0)
    for other in (
        {"b": rows},
        (rows,),
        {"a": {"b": rows}},
        rows,
        {"a": rows, "b": rows},
    ):
        with pytest.raises(mpidist.MismatchError, match="structure of value"):
            strategy.statistics_of({"a": rows} if comm.rank else other)
    assert strategy.statistics_of([1, 2] if comm.rank == 0 else []).maximum == 2
