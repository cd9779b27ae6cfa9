"""reduce_scatter and all_to_all, with NumPy as the oracle."""

import functools

import numpy as np
import pytest

import mpidist
from mpidist import CommunicationOptions
from mpidist.comm.transports import mpi

UFUNCS = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "PRODUCT": np.multiply}
DTYPES = ["i1", "i4", "u8", "f2", "f4", "f8", "c16"]


def local(strategy, fn):
    return strategy.experimental_local_results(strategy.run(fn))[0]


def context():
    return mpidist.get_replica_context()


def part(rank, shape, dtype="f8"):
    numbers = np.random.default_rng([3, rank]).integers(1, 4, shape)
    return np.asarray(numbers).astype(dtype)


def share(array, ranks, rank, axis=0, lengths=None):
    rows = array.shape[axis]
    if lengths is None:
        step = -(-rows // ranks)
        lengths = [max(0, min(step, rows - r * step)) for r in range(ranks)]
    start = sum(lengths[:rank])
    index = [slice(None)] * array.ndim
    index[axis] = slice(start, start + lengths[rank])
    return array[tuple(index)]


def check(result, expected):
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(result, expected)
    assert result.flags.c_contiguous
    assert result.flags.writeable


@pytest.fixture(params=["one call", "pairs"])
def way(request, monkeypatch):
    if request.param == "pairs":
        monkeypatch.setattr(mpi, "_MOST_BYTES", 24)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", [*UFUNCS, "MEAN"])
def test_reduce_scatter(strategy, comm, op, dtype):
    if dtype == "c16" and op in ("MIN", "MAX"):
        pytest.skip("they have no order")
    everyone = [part(rank, (7, 3), dtype) for rank in range(comm.size)]
    mine = everyone[comm.rank]
    found = local(strategy, lambda: context().reduce_scatter(op, mine))
    if op == "MEAN":
        wide = "f8" if dtype in ("i1", "i4", "u8") else dtype
        total = functools.reduce(np.add, [a.astype(wide) for a in everyone])
        total = (total.astype("f4" if dtype == "f2" else wide) / comm.size).astype(wide)
    else:
        total = functools.reduce(UFUNCS[op], everyone).astype(dtype)
    check(found, share(total, comm.size, comm.rank))


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(5, 6, 2), (1, 1, 1), (0, 2, 3), (400, 500, 2)])
def test_axes_and_shapes(way, comm, axis, shape, make_strategy):
    strategy = make_strategy()
    if shape[0] > 5 and way == "pairs":
        pytest.skip("as much in pieces of 24 bytes takes long")
    everyone = [part(rank, shape) for rank in range(comm.size)]
    mine = everyone[comm.rank]
    found = local(strategy, lambda: context().reduce_scatter("SUM", mine, axis))
    check(found, share(sum(everyone), comm.size, comm.rank, axis).copy())
    found = local(strategy, lambda: context().all_to_all(mine, axis))
    parts = [share(a, comm.size, comm.rank, axis) for a in everyone]
    check(found, np.concatenate(parts, axis=axis))


def test_lengths_that_differ(strategy, comm):
    n, me = comm.size, comm.rank
    lengths = list(range(n))  # none for the first, most for the last
    rows = sum(lengths)
    everyone = [part(rank, (rows, 2)) for rank in range(n)]
    found = local(
        strategy,
        lambda: context().reduce_scatter("SUM", everyone[me], lengths=lengths),
    )
    check(found, share(sum(everyone), n, me, lengths=lengths).copy())

    # How many rows each sends to each; each has another number of rows
    table = [[(r * 2 + s) % 3 for s in range(n)] for r in range(n)]
    everyone = [part(rank, (sum(table[rank]), 2)) for rank in range(n)]
    found = local(
        strategy, lambda: context().all_to_all(everyone[me], lengths=table[me])
    )
    parts = [share(everyone[r], n, me, lengths=table[r]) for r in range(n)]
    check(found, np.concatenate(parts))


def test_nests_and_options(strategy, comm):
    def value(rank):
        return {"a": part(rank, (4, 2)), "b": [part(rank, 9, "i4")]}

    options = CommunicationOptions(timeout_seconds=600.0)
    everyone = [value(rank) for rank in range(comm.size)]
    mine = everyone[comm.rank]
    found = local(strategy, lambda: context().all_to_all(mine, options=options))
    for get in (lambda v: v["a"], lambda v: v["b"][0]):
        parts = [share(get(v), comm.size, comm.rank) for v in everyone]
        check(get(found), np.concatenate(parts))
    found = local(strategy, lambda: context().reduce_scatter("MAX", mine))
    expected = functools.reduce(np.maximum, [v["b"][0] for v in everyone])
    check(found["b"][0], share(expected, comm.size, comm.rank).copy())


def test_to_send_back_gives_what_there_was(strategy, comm):
    mine = part(comm.rank, (3 * comm.size, 2))

    def there_and_back():
        there = context().all_to_all(mine)
        return context().all_to_all(there)

    check(local(strategy, there_and_back), mine)


@pytest.mark.parametrize("dtype", ["i1", "i8"])
def test_integers_that_do_not_fit_on_one_rank_are_an_error_on_all(
    strategy, comm, dtype
):
    mine = np.zeros(comm.size, dtype)
    mine[-1] = np.iinfo(dtype).max
    if comm.size == 1:
        check(local(strategy, lambda: context().reduce_scatter("SUM", mine)), mine)
        return
    for op in ("SUM", "PRODUCT"):
        with pytest.raises(mpidist.ArgumentError, match="does not fit"):
            local(strategy, lambda op=op: context().reduce_scatter(op, mine))
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.parametrize(
    ("lengths", "kind"),
    [("12", TypeError), (3, TypeError), ([1], ValueError), ([-1, 5, 0, 0], ValueError)],
)
def test_bad_lengths_are_an_error_on_all(strategy, comm, lengths, kind):
    mine = np.ones(comm.size + 1)
    bad = lengths if comm.rank == 0 else None
    for call in ("all_to_all", "reduce_scatter"):
        arguments = ("SUM", mine) if call == "reduce_scatter" else (mine,)

        def fn(call=call, arguments=arguments):
            return getattr(context(), call)(*arguments, lengths=bad)

        with pytest.raises(kind, match="lengths"):
            strategy.run(fn)
    assert strategy.reduce("SUM", 1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_values_that_differ_are_an_error_on_all(strategy, comm):
    mine = np.ones(4 + comm.rank)
    with pytest.raises(mpidist.MismatchError, match="reduce_scatter"):
        strategy.run(lambda: context().reduce_scatter("SUM", mine))
    other = np.ones(4, "f4" if comm.rank else "f8")
    with pytest.raises(mpidist.MismatchError, match="all_to_all"):
        strategy.run(lambda: context().all_to_all(other))


def test_scalars_have_no_parts(strategy):
    with pytest.raises(mpidist.ArgumentError, match="scalar"):
        strategy.run(lambda: context().all_to_all(1.0))
    with pytest.raises(mpidist.ContextError):
        ids = []
        strategy.run(lambda: ids.append(context()))
        ids[0].all_to_all(np.ones(2))
