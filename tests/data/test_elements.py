"""Elements stay what they are until `batch`, which changes no value."""

import h5py
import numpy as np
import pytest

import mpidist
from mpidist import Dataset
from mpidist.data import elements
from tests.support.all_ranks import in_order, on_all_ranks

ROWS = 8


class Metres(np.ndarray):
    """An array with more to it than numbers."""

    def to_feet(self):
        return np.asarray(self) * 3.0


def metres(*numbers):
    return np.array(numbers).view(Metres)


FUNCTIONS = {
    "bytes with NULs": (lambda i: b"ab" + bytes(int(i)), lambda s: len(bytes(s))),
    "text with NULs": (lambda i: "a" + "\0" * int(i), len),
    "numbers": (lambda i: 2**60 + 1 if i else 0.5, lambda v: int(v) % 1000),
    "other types": (lambda i: int(i) if i % 2 else True, lambda v: len(str(v))),
    "other lengths": (
        lambda i: np.arange(int(i) % 4),
        lambda x: np.pad(x, (0, 4 - len(x))),
    ),
    "masks": (lambda i: np.ma.array([1, -9], mask=[0, i % 2]), lambda x: x.filled(0)),
    "objects": (lambda i: {"x": {int(i)}}, lambda e: sum(e["x"])),
    "subclasses": (lambda i: metres(1, int(i)), lambda m: m.to_feet()),
}
STEPS = {
    "nothing": lambda d: d,
    "threads": lambda d: d.map(lambda x: x, num_parallel_calls=2),
    "take": lambda d: d.take(ROWS),
    "skip and shard": lambda d: d.skip(0).shard(1, 0),
    "repeat": lambda d: d.take(ROWS // 2).concatenate(d.skip(ROWS // 2)).repeat(1),
    "enumerate": lambda d: d.enumerate().map(lambda _, x: x),
    "zip": lambda d: Dataset.zip(d, Dataset.range(ROWS)).map(lambda x, _: x),
    "iterable": lambda d: d.filter(lambda x: True),
    "cache": lambda d: d.cache(),
}
# In distributed datasets rows of a cache lie in shared memory, so they must be alike
DISTRIBUTED = [name for name in STEPS if name != "cache"]


def build(name, step):
    first, second = FUNCTIONS[name]
    if step == "repeat" and name == "numbers":  # the two halves differ in dtype
        return Dataset.range(ROWS).map(first).map(second)
    return STEPS[step](Dataset.range(ROWS).map(first)).map(second)


def expected(name):
    first, second = FUNCTIONS[name]
    return np.stack([np.asarray(second(first(i))) for i in np.arange(ROWS)])


@pytest.mark.parametrize("step", DISTRIBUTED)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_maps_are_one_map_on_any_number_of_ranks(strategy, comm, name, step):
    divided = strategy.experimental_distribute_dataset(build(name, step).batch(3))
    found = in_order(on_all_ranks(strategy, comm, divided))
    np.testing.assert_array_equal(found, expected(name))


def test_tensors_stay_tensors_between_maps():
    torch = pytest.importorskip("torch")
    dataset = Dataset.range(4).map(lambda i: torch.full((2,), float(i)))
    (batch,) = dataset.map(lambda x: (type(x) is torch.Tensor) * x).batch(4)
    np.testing.assert_array_equal(batch, np.repeat(np.arange(4.0), 2).reshape(4, 2))


LOSSES = {
    "integers and floats": (lambda i: 2**60 + 1 if i % 2 else 0.5, "float64 and int64"),
    "times and numbers": (lambda i: [np.timedelta64(1, "D"), 5], "list"),
    "far times": (lambda i: [np.datetime64(9**5, "Y"), np.datetime64(1, "ns")], "list"),
    "very large integers": (lambda i: [2**70, 0.5], "Python objects"),
    "signed and unsigned": (
        lambda i: np.int64(-1) if i % 2 else np.uint64(2**63),
        "int64 and uint64",
    ),
    "precisions": (
        lambda i: np.float32(1) if i % 2 else np.float64(0.1),
        "float32 and float64",
    ),
    "text and bytes": (lambda i: "a" if i % 2 else b"a", "bytes and str"),
    "numbers and text": (lambda i: 1 if i % 2 else "1", "int64 and str"),
    "bools and integers": (lambda i: 1 if i % 2 else True, "bool and int64"),
    "units of time": (
        lambda i: np.timedelta64(1, "s" if i % 2 else "D"),
        r"timedelta64\[D\] and timedelta64\[s\]",
    ),
    "a mask": (lambda i: np.ma.array([1, -999], mask=[0, 1]), "mask"),
    "a masked number": (lambda i: np.ma.array([1, -999], mask=[0, 1])[1], "mask"),
    "masks in a list": (lambda i: [np.ma.array([1], mask=[1])], "mask"),
    "a subclass": (lambda i: metres(1), "Metres"),
    "NULs": (lambda i: b"a\0", "NUL"),
    "NULs in a list": (lambda i: ["a\0", "b"], "NUL"),
    "numbers in a list": (lambda i: [2**60 + 1, 0.5], "list"),
    "lengths in a list": (lambda i: [[1, 2], [3]], "list"),
    "objects": (lambda i: {1}, "builtins.set"),
    "other shapes": (lambda i: np.zeros(i), "elements that differ"),
    "other members": (lambda i: pets(("dog", "cat")[i % 2]), "the same members"),
}


def pets(name, dtype=">i2"):
    return np.ones(2, h5py.enum_dtype({name: 1}, dtype))


@pytest.mark.parametrize("kind", [">i2", "<i2", "fields"])
@pytest.mark.parametrize("step", STEPS)
def test_enums_keep_their_members_in_every_batch(strategy, step, kind):
    enum = pets("cat", "i4" if kind == "fields" else kind).dtype
    dtype = np.dtype([("a", enum), ("b", ">f4")]) if kind == "fields" else enum
    files = Dataset.from_tensor_slices(np.ones((ROWS, 2), dtype))
    rows = STEPS[step](files).concatenate(STEPS[step](files.map(lambda x: x)))
    divided = strategy.experimental_distribute_dataset(rows.batch(3))
    for batch in [*rows.batch(3), *mpidist.as_arrays(divided)]:
        found = batch.dtype["a"] if kind == "fields" else batch.dtype
        assert h5py.check_enum_dtype(found) == {"cat": 1}


@pytest.mark.parametrize("kind", ["map", "dict", "generator", "cache"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_batch_that_would_change_values_is_an_error_on_all_ranks(
    strategy, name, kind
):
    function, reason = LOSSES[name]
    rows = Dataset.range(4 * strategy.num_replicas_in_sync).map(function)
    if kind == "dict":
        rows = rows.map(lambda x: {"x": x})
    if kind == "generator":
        rows = rows.filter(lambda x: True)
    batches = (rows.cache() if kind == "cache" else rows).batch(
        4 * strategy.num_replicas_in_sync
    )
    errors = mpidist.DataError, mpidist.ArgumentError
    with pytest.raises(errors, match=reason) as info:
        list(strategy.experimental_distribute_dataset(batches))
    assert "CollectiveError" not in type(info.value).__name__


@pytest.mark.parametrize("name", LOSSES)
def test_one_process_converts_nothing_but_numbers_and_warns(name, monkeypatch):
    function, reason = LOSSES[name]
    monkeypatch.setattr(elements, "_warned", set())
    batches = Dataset.range(4).map(function).batch(4)
    if name in ("integers and floats", "signed and unsigned", "precisions"):
        with pytest.warns(RuntimeWarning, match=reason):
            list(batches)
    else:
        with pytest.raises(mpidist.DataError, match=reason):
            list(batches)


@pytest.mark.parametrize("is_generated", [False, True])
def test_masks_from_a_map_of_batches_are_refused(strategy, is_generated):
    rows = np.ma.array([[1.0, -999.0]] * 8, mask=[[0, 1]] * 8)
    batches = Dataset.range(8).batch(4)
    if is_generated:
        batches = batches.filter(lambda x: True)
    batches = batches.map(lambda i: {"x": rows[np.asarray(i)]})
    with pytest.raises(mpidist.DataError, match="mask"):
        list(strategy.experimental_distribute_dataset(batches))


@pytest.mark.parametrize("by", ["ranks", "batches"])
def test_rows_have_one_dtype_on_all_ranks_and_in_all_batches(strategy, by):
    """Each slice of a batch has one dtype, but not all slices have the same."""
    n = strategy.num_replicas_in_sync
    if by == "ranks" and n == 1:
        pytest.skip("one slice")
    first = 2 if by == "ranks" else 2 * n
    rows = Dataset.range(6 * n).map(lambda i: 0.5 if i < first else int(i))
    batches = strategy.experimental_distribute_dataset(rows.batch(2 * n))
    errors = mpidist.DataError, mpidist.MismatchError
    with pytest.raises(errors, match=r"float64(.|\n)*int64|int64(.|\n)*float64"):
        list(batches)


def test_text_of_any_length_makes_batches(strategy, comm):
    words = [b"a" * (i % 5 + 1) for i in range(12)]
    for rows in (
        Dataset.range(12).map(lambda i: words[i]),
        Dataset.from_generator(lambda: iter(words)),
    ):
        divided = strategy.experimental_distribute_dataset(rows.batch(4))
        assert in_order(on_all_ranks(strategy, comm, divided)) == words


def test_bytes_of_a_generator_keep_their_nuls():
    records = [b"\0a\0", b"\0"]
    dataset = Dataset.from_generator(lambda: iter(records))
    assert [bytes(record) for record in dataset] == records
    assert list(dataset.map(lambda r: len(bytes(r)))) == [3, 1]
    with pytest.raises(mpidist.DataError, match="NUL"):
        list(dataset.batch(2))


def sparse(name):
    scipy_sparse = pytest.importorskip("scipy.sparse")
    return getattr(scipy_sparse, name)(np.eye(3))


def frame(**columns):
    return pytest.importorskip("pandas").DataFrame(columns)


IDS = [2**53 + 1, None, 5]  # floats, with nan for None, do not hold the first


def column(package, *names):
    """Return IDS as a column of a package, of a type and perhaps a dtype."""
    module = pytest.importorskip(package)
    kind = getattr(module, names[0])
    return kind(IDS, dtype=names[1]) if names[1:] else kind(IDS)


def arrow_table(**columns):
    return pytest.importorskip("pyarrow").table(columns)


ARGUMENTS = {
    "ids of pandas": (lambda: column("pandas", "Series", "Int64"), "rounded"),
    "index of pandas": (lambda: {"x": column("pandas", "Index", "UInt64")}, "rounded"),
    "ids in a list": (lambda: [column("pandas", "Series", "Int64")], "rounded"),
    "categories": (
        lambda: column("pandas", "Series", "Int64").astype("category"),
        "rounded",
    ),
    "ids of Polars": (lambda: column("polars", "Series"), "rounded"),
    "ids of PyArrow": (lambda: (column("pyarrow", "array"),), "rounded"),
    "text of Polars": (
        lambda: pytest.importorskip("polars").Series(["a\0", "b"]),
        "NULs",
    ),
    "long integers": (
        lambda: pytest.importorskip("polars").Series([2**100]),
        "128-bit|Python objects",
    ),
    "columns of Polars": (
        lambda: pytest.importorskip("polars").DataFrame({"x": IDS, "y": [1, 2, 3]}),
        "rounded",
    ),
    "dictionary of PyArrow": (
        lambda: (
            pytest.importorskip("pyarrow")
            .chunked_array([[True, None]])
            .dictionary_encode()
        ),
        "missing values",
    ),
    "columns of PyArrow": (lambda: arrow_table(x=[2**60 + 1], y=[0.5]), "data frame"),
    "missing flags": (
        lambda: pytest.importorskip("pandas").Series([True, None], dtype="boolean"),
        "Python objects",
    ),
    "csr_matrix": (lambda: sparse("csr_matrix"), "toarray"),
    "csc_array": (lambda: sparse("csc_array"), "toarray"),
    "coo_array": (lambda: {"x": sparse("coo_array"), "y": np.ones(3)}, "toarray"),
    "ragged": (lambda: [[1, 2], [3]], "unlike lengths"),
    "ragged tuple": (lambda: ([1, 2], [[1], [1, 2]]), "unlike lengths"),
    "ragged arrays": (lambda: [np.ones(2), np.ones(3)], "unlike lengths"),
    "objects": (lambda: np.array([1, "a", None], object), "Python objects"),
    "object in a list": (lambda: [1, None], "Python objects"),
    "large integers": (lambda: [2**70], "Python objects"),
    "list of mixed numbers": (lambda: [2**60 + 1, 0.5], "list of data"),
    "list of mixed types": (lambda: ["a", 1], "list of data"),
    "nested list": (lambda: [[2**60 + 1, 1], [0.5, 1]], "list of data"),
    "mask": (lambda: np.ma.array([1, 2], mask=[0, 1]), "mask"),
    "subclass": (lambda: metres(1, 2), "Metres"),
    "columns": (lambda: frame(x=[2**60 + 1], y=[0.5]), r"dict\(frame\)"),
    "column of objects": (lambda: dict(frame(x=["a", None])), "Python objects"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_has_no_rows_of_numbers_is_refused_by_name(name):
    make, reason = ARGUMENTS[name]
    with pytest.raises(mpidist.ArgumentError, match=f"from_tensor_slices.*{reason}"):
        Dataset.from_tensor_slices(make())


def test_rows_of_lists_and_columns_are_as_they_were():
    for rows in (
        [[1, 2], [3, 4]],
        [1, 2.5],
        ["a", "bc"],
        [True, False],
        [(1, 2), (3, 4)],
    ):
        found = np.stack([np.asarray(row) for row in Dataset.from_tensor_slices(rows)])
        np.testing.assert_array_equal(found, np.array(rows))


FILLED = [2**53 + 1, -1, 5]
COLUMNS = {
    "filled": (lambda: column("pandas", "Series", "Int64").fillna(-1), FILLED),
    "dropped": (lambda: column("pandas", "Series", "Int64").dropna(), FILLED[::2]),
    "of Polars": (lambda: column("polars", "Series").fill_null(-1), FILLED),
    "of PyArrow": (lambda: column("pyarrow", "array").fill_null(-1), FILLED),
    "as floats": (
        lambda: column("pyarrow", "array").cast("float64", safe=False),
        [2.0**53, np.nan, 5],
    ),
    "small": (lambda: column("polars", "Series")[1:], [np.nan, 5]),
    "floats": (
        lambda: pytest.importorskip("pandas").Series([1e20, None], dtype="Float64"),
        [1e20, np.nan],
    ),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_lose_nothing_are_as_they_were(name):
    make, want = COLUMNS[name]
    found = np.stack(list(Dataset.from_tensor_slices(make())))
    np.testing.assert_array_equal(found, np.array(want))


@pytest.mark.parametrize("is_generated", [False, True])
@pytest.mark.parametrize("of", ["row", "batch"])
def test_text_of_numpy_2_is_text_in_rows_of_functions(strategy, comm, of, is_generated):
    text = np.dtypes.StringDType()
    words = np.array(["a", "", "x" * 300, "b\0"] * 2, text)
    rows = Dataset.range(8)
    rows = rows.filter(lambda i: True) if is_generated else rows
    if of == "row":
        rows = rows.map(lambda i: np.array(words[i], text)).batch(5)
    else:
        rows = rows.batch(5).map(lambda i: words[i])
    divided = strategy.experimental_distribute_dataset(rows)
    assert in_order(on_all_ranks(strategy, comm, divided)) == words.tolist()


@pytest.mark.parametrize("of", ["row", "batch"])
def test_objects_in_arrays_of_functions_are_refused(strategy, of):
    rows = Dataset.range(8)
    if of == "row":
        rows = rows.map(lambda i: [2**70, 0.5]).batch(4)
    else:
        rows = rows.batch(4).map(lambda i: np.array([None] * len(i)))
    with pytest.raises(mpidist.DataError, match="Python objects"):
        list(strategy.experimental_distribute_dataset(rows))


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ((0, 300, 100), np.int8),
        ((0, -300, -100), np.int8),
        ((-1, 2), np.uint8),
        ((2050,), np.float16),
        ((2**53 - 1, 2**53 + 2), np.float64),
        ((3,), bool),
        ((3,), "S1"),
    ],
)
def test_a_range_that_its_dtype_does_not_hold_is_refused(arguments, dtype):
    with pytest.raises(mpidist.ArgumentError, match="does not hold"):
        Dataset.range(*arguments, output_type=dtype)


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [((-128, 128), np.int8), ((2049,), np.float16), ((2,), bool), ((500, 0), "i1")],
)
def test_a_range_that_its_dtype_holds_is_exact(arguments, dtype):
    found = [int(i) for i in Dataset.range(*arguments, output_type=dtype)]
    assert found == list(range(*arguments))


def test_numbers_of_enumerate_do_not_wrap():
    with pytest.raises(OverflowError):
        list(Dataset.range(3).enumerate(2**63 - 2).batch(3))


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_collectives_and_files_do_not_round_columns(strategy, mpi_tmp_path, package):
    ids = column(package, "Series", *["Int64"] * (package == "pandas"))
    with pytest.raises(mpidist.DTypeError, match="rounded"):
        strategy.reduce("SUM", ids)
    with mpidist.Hdf5Writer(strategy, mpi_tmp_path / "ids.h5") as writer:
        with pytest.raises(mpidist.DTypeError, match="rounded"):
            writer.append(ids)
        writer.append(ids[2:])
