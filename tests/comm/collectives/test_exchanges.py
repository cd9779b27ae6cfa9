"""reduce_scatter and all_to_all; the model of calls draws what is usual."""

import numpy as np
import pytest

import mpidist
from mpidist.comm.transports import mpi


def local(strategy, fn):
    return strategy.experimental_local_results(strategy.run(fn))[0]


def context():
    return mpidist.get_replica_context()


def part(rank, shape):
    return np.random.default_rng([3, rank]).integers(1, 4, shape).astype(float)


def share(array, ranks, rank, axis):
    step = -(-array.shape[axis] // ranks)
    return np.split(array, [step * i for i in range(1, ranks)], axis)[rank]


def check(result, expected):
    np.testing.assert_array_equal(result, expected, strict=True)
    assert result.flags.c_contiguous
    assert result.flags.writeable


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("shape", [(5, 6, 2), (1, 1, 1), (0, 2, 3)])
def test_more_than_one_call_of_mpi_takes(comm, monkeypatch, axis, shape, make_strategy):
    monkeypatch.setattr(mpi, "_MOST_BYTES", 24)
    strategy = make_strategy()
    everyone = [part(rank, shape) for rank in range(comm.size)]
    mine = everyone[comm.rank]
    found = local(strategy, lambda: context().reduce_scatter("SUM", mine, axis))
    check(found, share(sum(everyone), comm.size, comm.rank, axis).copy())
    found = local(strategy, lambda: context().all_to_all(mine, axis))
    parts = [share(a, comm.size, comm.rank, axis) for a in everyone]
    check(found, np.concatenate(parts, axis=axis))


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
