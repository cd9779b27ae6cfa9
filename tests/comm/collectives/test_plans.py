"""Calls of a kind that was seen before: other lengths, other values, other faults."""

import numpy as np
import pytest

import mpidist

OPTIONS = [None, mpidist.CommunicationOptions(timeout_seconds=60.0)]


@pytest.fixture
def rank(strategy):
    return strategy.extended.replica_id


@pytest.fixture
def size(strategy):
    return strategy.num_replicas_in_sync


def in_replica(strategy, fn):
    """Return what `fn(replica context)` returns on this replica."""
    result = strategy.run(lambda: (fn(mpidist.get_replica_context()),))
    (local,) = strategy.experimental_local_results(result[0])
    return local


def ragged(seed, shape, axis, size):
    """Return an array for each rank, whose lengths along an axis differ."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(size):
        lengths = list(shape)
        lengths[axis] = int(random.integers(0, shape[axis] + 1))
        found.append(random.normal(size=lengths))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=["default", "timeout"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((9,), 0), ((7, 3), 0), ((3, 7), -1), ((2, 5, 4), 1), ((0, 4), 1), ((4, 0), 0)],
)
def test_lengths_may_change_from_call_to_call(
    strategy, rank, size, shape, axis, options
):
    for seed in range(6):
        parts = ragged(seed, shape, axis, size)
        found = in_replica(
            strategy, lambda c, p=parts: c.all_gather(p[rank], axis, options)
        )
        np.testing.assert_array_equal(found, np.concatenate(parts, axis), strict=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_one_rank_may_have_much_more_than_the_others(strategy, rank, size, axis):
    # Sizes around what fits beside the comparison, and far more
    for rows in (1, 3000, 1, 5500, 9000, 40000, 2, 0):
        for first in range(size):
            shapes = [(rows if r == first else 2, 4) for r in range(size)]
            parts = [np.full(s, r, np.float32) for r, s in enumerate(shapes)]
            parts = [p if axis == 0 else np.asfortranarray(p).T for p in parts]
            found = in_replica(
                strategy, lambda c, p=parts, r=rank: c.all_gather(p[r], axis)
            )
            expected = np.concatenate(parts, axis)
            np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", "c16", "M8[s]", "U3", "S5", [("a", "i4"), ("b", "f8", (2,))], ">f4"],
)
def test_any_dtype_is_gathered_again(strategy, rank, size, dtype):
    for length in (3, 0, 5):
        parts = [
            np.arange(length + r).astype("i4").astype(np.dtype(dtype))
            for r in range(size)
        ]
        found = in_replica(strategy, lambda c, p=parts: c.all_gather(p[rank], 0))
        expected = np.concatenate(parts)
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()


def test_views_of_all_layouts_are_gathered(strategy, rank, size):
    for step in (1, 2, -1):
        whole = [np.arange(24.0).reshape(4, 6)[::step, ::-1] + r for r in range(size)]
        found = in_replica(
            strategy,
            lambda c, w=whole: c.all_gather({"a": w[rank], "b": [w[rank].T]}, 1),
        )
        np.testing.assert_array_equal(found["a"], np.concatenate(whole, 1))
        columns = [w.T for w in whole]
        np.testing.assert_array_equal(found["b"][0], np.concatenate(columns, 1))


def test_results_are_not_changed_by_later_calls(strategy, rank, size):
    def collect(context):
        kept = []
        for i in range(5):
            kept.append(
                (
                    context.all_gather(np.array([rank, i]), 0),
                    context.all_reduce("SUM", np.array([1.0, i])),
                    context.reduce_scatter("SUM", np.full(2 * size, float(i))),
                    context.all_to_all(np.full(size, 10 * i + rank)),
                )
            )
        return kept

    for i, (gathered, total, part, exchanged) in enumerate(
        in_replica(strategy, collect)
    ):
        expected = np.array([[r, i] for r in range(size)]).reshape(-1)
        np.testing.assert_array_equal(gathered, expected)
        np.testing.assert_array_equal(total, [size, i * size])
        np.testing.assert_array_equal(part, [i * size, i * size])
        np.testing.assert_array_equal(exchanged, 10 * i + np.arange(size))


@pytest.mark.parametrize("axis", [0, -1, (0, 1), (1, -2)])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PRODUCT"])
@pytest.mark.parametrize("dtype", ["f4", "i8", "u1"])
def test_reductions_over_an_axis_again(strategy, rank, size, op, axis, dtype):
    names = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min}
    reduce = {**names, "MAX": np.max, "PRODUCT": np.prod}[op]
    for seed in range(4):
        random = np.random.default_rng(seed)
        rows = random.integers(1, 4, size)
        shapes = [(n, 3) if axis != -1 else (3, n) for n in rows]
        # Small, so that products fit
        parts = [random.integers(0, 2, s).astype(dtype) for s in shapes]
        value = strategy.experimental_distribute_values_from_function(
            lambda context, p=parts: p[context.replica_id_in_sync_group]
        )
        found = strategy.reduce(op, value, axis=axis)
        along = -1 if axis == -1 else 0
        expected = reduce(np.concatenate(parts, along), axis=axis)
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        assert np.shape(found) == np.shape(expected)


def test_sums_over_an_axis_that_overflow_are_found_again(strategy):
    value = np.full(3, 1 << 60)
    for _ in range(2):
        assert strategy.reduce("SUM", value // 64, axis=0) > 0
        with pytest.raises(mpidist.errors.ArgumentError, match="does not fit int64"):
            strategy.reduce("SUM", value * 4, axis=0)


def test_components_of_any_structure_are_reduced(strategy, size):
    def make(first):
        return strategy.run(lambda: first)

    for _ in range(2):
        total = strategy.reduce("SUM", [make(1.5), make(np.ones(2))])
        np.testing.assert_array_equal(total[0], 1.5 * size)
        np.testing.assert_array_equal(total[1], [size, size])
        nested = mpidist.PerReplica(({"a": np.ones(2)},))
        found = strategy.reduce("SUM", nested)
        np.testing.assert_array_equal(found["a"], [size, size])
        found = strategy.reduce("SUM", {"x": make(np.float32(2)), "y": make(1.0)})
        assert (found["x"], found["y"]) == (2 * size, size)


def test_lists_and_tuples_are_kinds_of_their_own(strategy, size):
    for kind in (list, tuple, list):
        value = kind([np.ones(2), np.ones(3)])
        assert type(strategy.reduce("SUM", value)) is kind
        assert type(strategy.reduce("SUM", value, axis=0)) is kind
        assert type(strategy.gather(value, 0)) is kind


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["gather", "over axis", "scatter", "to all"])
def test_another_dtype_of_one_rank_is_an_error_on_all(strategy, call):
    rank = strategy.extended.replica_id

    def make(dtype):
        return np.ones(4 * strategy.num_replicas_in_sync, dtype)

    def use(value):
        if call == "gather":
            return strategy.gather(value, 0)
        if call == "over axis":
            return strategy.reduce("SUM", value, axis=0)
        name = "reduce_scatter" if call == "scatter" else "all_to_all"
        arguments = ("SUM", value) if call == "scatter" else (value,)
        return strategy.run(
            lambda: getattr(mpidist.get_replica_context(), name)(*arguments)
        )

    for _ in range(3):
        use(make("f8"))
    use(make("f4"))
    for _ in range(2):
        with pytest.raises(mpidist.errors.MismatchError, match=r"float\d+.*float\d+"):
            use(make("f4" if rank == 1 else "f8"))
    use(make("f8"))


def test_a_known_plan_does_not_hide_what_is_wrong_with_a_call(strategy):
    rows = np.ones((2, 2))
    for _ in range(2):
        strategy.gather(rows, 0)
        strategy.reduce("SUM", rows, axis=0)
        with pytest.raises(mpidist.errors.ArgumentError, match="axis 2"):
            strategy.gather(rows, 2)
        with pytest.raises(mpidist.errors.ArgumentTypeError, match="axis"):
            strategy.gather(rows, True)
        with pytest.raises(mpidist.errors.ArgumentError, match="axis"):
            strategy.reduce("SUM", rows, axis=(0, -2))
        with pytest.raises(mpidist.errors.ArgumentError, match="ADD"):
            strategy.reduce("ADD", rows, axis=0)
        with pytest.raises(mpidist.errors.ArgumentTypeError):
            strategy.gather([rows, "text"], 0)


@pytest.mark.mpi(min_size=2)
def test_what_fails_on_one_rank_in_a_repeated_call_fails_on_all(strategy, rank):
    class Unreadable(dict):
        def __getitem__(self, key):
            raise RuntimeError("cannot be read")

    for _ in range(2):
        strategy.gather({"a": np.ones(2)}, 0)
        with pytest.raises(RuntimeError, match="cannot be read"):
            strategy.gather((Unreadable if rank else dict)(a=np.ones(2)), 0)
