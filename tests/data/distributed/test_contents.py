"""Ranks that pass unlike arrays in memory learn of it when they distribute them."""

import numpy as np
import pytest

import mpidist
from mpidist import AutoShardPolicy, Dataset, Options
from mpidist.data import contents
from tests.support.all_ranks import in_order, on_all_ranks

SAME = np.arange(24.0)


def own(comm):
    """Rows in an order of this rank alone."""
    return np.random.default_rng(comm.rank).permutation(SAME)


def slices(rows):
    return Dataset.from_tensor_slices(rows)


BUILDS = {
    "array": slices,
    "dict": lambda rows: slices({"x": SAME, "y": rows}),
    "list": lambda rows: slices(rows.tolist()),
    "text": lambda rows: slices(rows.astype(str)),
    "not contiguous": lambda rows: slices(np.stack([SAME, rows]).T[::2]),
    "one bit": lambda rows: slices(np.copysign(np.zeros(24), rows - 12)),
    "from_tensors": lambda rows: Dataset.from_tensors(rows),
    "zip": lambda rows: Dataset.zip(slices(SAME), slices(rows)),
    "concatenate": lambda rows: slices(SAME).concatenate(slices(rows)),
    "transformed": lambda rows: slices(rows).map(lambda x: x).cache().shuffle(seed=1),
    "filter": lambda rows: slices(rows).filter(lambda x: True),
    "interleave": lambda rows: slices(rows).interleave(lambda x: slices(SAME)),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", BUILDS)
def test_arrays_that_differ_are_an_error_on_all_ranks(strategy, comm, name):
    dataset = BUILDS[name](own(comm)).batch(4)
    with pytest.raises(mpidist.MismatchError, match=r"from_tensor.* on rank 0;"):
        strategy.experimental_distribute_dataset(dataset)
    list(strategy.experimental_distribute_dataset(slices(SAME).batch(4)))


@pytest.mark.mpi(min_size=2)
def test_the_error_names_the_array_and_the_ranks(strategy, comm):
    rows = SAME + (comm.rank == comm.size - 1)
    with pytest.raises(mpidist.MismatchError) as info:
        strategy.experimental_distribute_dataset(slices((SAME, rows)).batch(4))
    assert "from_tensor_slices[1]" in str(info.value)
    assert f"on rank {comm.size - 1}" in str(info.value)


def test_rows_of_each_rank_on_purpose_may_differ(strategy, comm):
    off = Options(AutoShardPolicy.OFF)
    dataset = slices(own(comm)).batch(4 * comm.size).with_options(off)
    for divided in (
        strategy.experimental_distribute_dataset(dataset),
        strategy.distribute_datasets_from_function(lambda _: dataset),
    ):
        steps = on_all_ranks(strategy, comm, divided)
        mine = [part[comm.rank] for part in steps]
        np.testing.assert_array_equal(np.concatenate(mine), own(comm))


EQUAL = {
    "no rows": lambda: np.zeros((0, 3)),
    "no bytes": lambda: np.zeros((5, 0)),
    "padding": lambda: np.zeros(5, np.longdouble),
    "records": lambda: np.zeros(5, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "text": lambda: np.array(["a", "bc"]),
    "times": lambda: np.arange(5).astype("M8[s]"),
    "nan": lambda: np.full(5, np.nan),
    "strides": lambda: np.arange(20).reshape(4, 5)[::-1, ::2],
    "broadcast": lambda: np.broadcast_to(np.float32(1), (6, 2)),
}


@pytest.mark.parametrize("is_sampled", [False, True])
@pytest.mark.parametrize("name", EQUAL)
def test_equal_arrays_of_any_kind_are_distributed(
    strategy, comm, monkeypatch, name, is_sampled
):
    if is_sampled:
        monkeypatch.setattr(contents, "_WHOLE_BYTES", -1)
    rows = EQUAL[name]()
    # Bytes between the fields of records are not values
    if name in ("padding", "records"):
        rows.view(np.uint8).reshape(len(rows), -1)[:] = comm.rank
        rows[...] = np.zeros((), rows.dtype)
    divided = strategy.experimental_distribute_dataset(slices(rows).batch(2))
    assert len(in_order(on_all_ranks(strategy, comm, divided))) == len(rows)


@pytest.mark.mpi(min_size=2)
def test_of_large_arrays_rows_are_sampled_and_that_is_logged(
    strategy, comm, monkeypatch
):
    lines = []
    monkeypatch.setattr(contents, "_WHOLE_BYTES", 100)
    monkeypatch.setattr(contents.logs, "info", lambda _, text: lines.append(text))
    strategy.experimental_distribute_dataset(slices(SAME).batch(4))
    with pytest.raises(mpidist.MismatchError):
        strategy.experimental_distribute_dataset(slices(own(comm)).batch(4))
    found = ["compared between ranks, not all" in line for line in lines]
    assert any(found) == (comm.rank == 0)


def test_an_array_that_one_rank_changes_is_seen_at_the_next_call(strategy, comm):
    rows = SAME.copy()
    dataset = slices(rows).batch(4)
    list(strategy.experimental_distribute_dataset(dataset))
    if comm.size == 1:
        pytest.skip("one rank differs from none")
    rows[3] += comm.rank
    with pytest.raises(mpidist.MismatchError):
        strategy.experimental_distribute_dataset(dataset)


def columns_with(package, number):
    """Return tables and columns in which float64 would hide the last digit."""
    module = pytest.importorskip(package)
    if package == "pyarrow":
        column, table = module.array([number, None]), module.table
    else:
        options = {"dtype": "Int64"} if package == "pandas" else {}
        column, table = module.Series([number, None], **options), module.DataFrame
    mixed = table({"x": [number, 2], "y": [0.5, 1]})
    return {"column": column, "table": table({"x": column}), "mixed": mixed}


@pytest.mark.parametrize("kind", ["column", "table", "mixed", "list"])
@pytest.mark.parametrize("package", ["pandas", "polars", "pyarrow"])
def test_digits_that_floats_do_not_hold_are_compared(package, kind):
    def sums(number):
        held = {**columns_with(package, number), "list": [number, 0.5]}[kind]
        arrays = contents.held_arrays([held], "rows")
        return [contents._checksum(array, is_whole=True) for _, array in arrays]

    assert sums(2**53) == sums(2**53)
    assert sums(2**53) != sums(2**53 + 1)


def test_text_of_each_ranks_own_may_have_any_width(strategy, comm):
    words = [b"a" * (1 + comm.rank)] * 4
    divided = strategy.distribute_datasets_from_function(
        lambda context: slices(np.array(words)).batch(2)
    )
    assert len(in_order(on_all_ranks(strategy, comm, divided))) == 4 * comm.size
    generated = strategy.distribute_datasets_from_function(
        lambda context: slices(np.array(words)).filter(lambda x: True).batch(2)
    )
    assert len(in_order(on_all_ranks(strategy, comm, generated))) == 4 * comm.size
