"""What holds for every collective: on its first call, and on those that repeat it."""

import collections
import itertools
import resource
import warnings
from pathlib import Path

import numpy as np
import pytest

import mpidist
from mpidist.util import nest
from mpidist.values import local_component

SIZES = [4, 60_000]  # sent with the comparison of the calls, and after it


def local(result):
    """Return this rank's components."""
    return nest.map_leaves(local_component, result)


def in_replica(fn):
    """Return a collective of the replica context, called in `strategy.run`."""

    def call(strategy, value):
        result = strategy.run(lambda: (fn(mpidist.get_replica_context(), value),))[0]
        return local(result)

    return call


def to_devices(fn):
    """Return a collective of `strategy.extended`, of one value to all devices."""

    def call(strategy, value):
        result = fn(strategy.extended, value, strategy.extended.worker_devices)
        return local(result)

    return call


def in_buckets(strategy, value):
    buckets = strategy.gradient_buckets([value], "SUM")
    with buckets:
        buckets.put(0, value)
    result = buckets.result[0]
    buckets.close()
    return result


COLLECTIVES = {
    "reduce SUM": lambda s, x: s.reduce("SUM", x),
    "reduce MEAN": lambda s, x: s.reduce("MEAN", x),
    "reduce MIN": lambda s, x: s.reduce("MIN", x),
    "reduce PRODUCT": lambda s, x: s.reduce("PRODUCT", x),
    "reduce SUM over axis": lambda s, x: s.reduce("SUM", x, axis=0),
    "reduce MEAN over axis": lambda s, x: s.reduce("MEAN", x, axis=0),
    "reduce MAX over axis": lambda s, x: s.reduce("MAX", x, axis=0),
    "gather": lambda s, x: s.gather(x, axis=0),
    "all_reduce": in_replica(lambda c, x: c.all_reduce("SUM", x)),
    "all_gather": in_replica(lambda c, x: c.all_gather(x, axis=0)),
    "all_to_all": in_replica(lambda c, x: c.all_to_all(x, axis=0)),
    "reduce_scatter SUM": in_replica(lambda c, x: c.reduce_scatter("SUM", x, axis=0)),
    "reduce_scatter MEAN": in_replica(lambda c, x: c.reduce_scatter("MEAN", x, axis=0)),
    "reduce_scatter PRODUCT": in_replica(
        lambda c, x: c.reduce_scatter("PRODUCT", x, axis=0)
    ),
    "reduce_to": to_devices(lambda e, x, to: e.reduce_to("SUM", x, to)),
    "batch_reduce_to": to_devices(
        lambda e, x, to: e.batch_reduce_to("SUM", [(x, to)])[0]
    ),
    "broadcast_to": to_devices(lambda e, x, to: e.broadcast_to(x, to)),
    "broadcast": lambda s, x: s.broadcast(x),
    "broadcast_object": lambda s, x: s.broadcast_object(x),
    "gather_objects": lambda s, x: s.gather_objects(x)[0],
    "gradient_buckets": in_buckets,
}
OBJECTS = [
    COLLECTIVES[name] for name in ("broadcast", "broadcast_object", "gather_objects")
]
NESTS = {
    "dict": lambda items: dict(items),
    "OrderedDict": lambda items: collections.OrderedDict(items),
    "defaultdict": lambda items: collections.defaultdict(list, items),
    "Counter": lambda items: collections.Counter(dict(items)),
    "nested": lambda items: [{"x": dict(items)}, *dict(items).values()],
}


@pytest.fixture(params=COLLECTIVES)
def collective(request):
    return COLLECTIVES[request.param]


@pytest.fixture
def rank(strategy):
    return strategy.extended.replica_id


def test_the_table_has_every_collective_of_a_replica():
    members = vars(mpidist.ReplicaContext).items()
    names = {n for n, member in members if "Collective" in (member.__doc__ or "")}
    assert "all_reduce" in names
    assert names - {"merge_call"} <= {name.split()[0] for name in COLLECTIVES}


def same(found, expected):
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("size", SIZES)
def test_every_call_ends_and_is_counted(strategy, rank, collective, size):
    consensus = strategy.extended.consensus

    def count():
        operations = strategy.statistics()["operations"].values()
        return sum(operation["calls"] for operation in operations)

    counts, entries = [], []
    for _ in range(3):
        before = count()
        collective(strategy, np.full(size, rank + 1.0))
        counts.append(count() - before)
        assert not consensus.lock.holder
        entries.append(consensus.recorder.last())
    assert counts[0] == counts[1] == counts[2]
    if strategy.num_replicas_in_sync > 1:
        assert all(entry.ended is not None for entry in entries)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("calls", [0, 1])
def test_an_exception_of_a_signal_handler_is_announced(
    strategy, rank, collective, size, calls, monkeypatch
):
    consensus, last = strategy.extended.consensus, strategy.num_replicas_in_sync - 1
    if not last:
        pytest.skip("one rank waits for nobody")
    value = np.full(size, rank + 1.0)
    for _ in range(calls):
        collective(strategy, value)

    def agrees(*_):
        raise ZeroDivisionError  # as a handler does while this rank waits

    if rank == last:
        monkeypatch.setattr(consensus.comparison, "agrees", agrees)
        with pytest.raises(ZeroDivisionError):
            collective(strategy, value)
        monkeypatch.undo()
    for _ in range(2 if rank == last else 3):
        with pytest.raises(mpidist.CollectiveError):
            collective(strategy, value)


@pytest.mark.parametrize("size", SIZES)
def test_results_have_the_order_of_their_argument(strategy, rank, collective, size):
    leaves = {name: np.full(size, rank + i + 1.0) for i, name in enumerate("abc")}
    expected = {name: collective(strategy, leaf) for name, leaf in leaves.items()}
    for make, order in itertools.product(NESTS.values(), ("abc", "cab", "bca")):
        value = make((name, leaves[name]) for name in order)
        if collective in OBJECTS and type(value) not in (dict, list):
            continue  # an object of this type is refused
        found = collective(strategy, value)
        assert type(found) is type(value)
        inner = found[0]["x"] if isinstance(found, list) else found
        assert list(inner) == list(order)
        for name, result in inner.items():
            same(result, expected[name])
        if isinstance(value, collections.defaultdict):
            assert found.default_factory is list


def test_the_order_of_an_ordered_dict_must_agree(strategy, rank):
    names = "abc" if rank % 2 else "cba"
    value = collections.OrderedDict((name, np.full(4, 2.0)) for name in names)
    for _ in range(2):
        if strategy.num_replicas_in_sync == 1:
            assert list(strategy.reduce("SUM", value)) == list(names)
            continue
        with pytest.raises(mpidist.errors.MismatchError, match="structure"):
            strategy.reduce("SUM", value)


EXTREME = {
    "opposite infinities": lambda rank, _: [-np.inf, np.inf][rank % 2],
    "nan": lambda rank, _: [np.nan, 1.0][rank % 2],
    "too large": lambda _, limits: limits.max,
    "too small": lambda _, limits: limits.tiny,
}


@pytest.mark.parametrize("size", SIZES)
def test_traps_of_one_rank_do_not_matter(strategy, rank, collective, size):
    mode = ["raise", "warn"][rank % 2]
    for dtype, case in itertools.product(["f2", "f4", "f8"], EXTREME):
        value = np.ones(size, dtype)
        value[-1] = EXTREME[case](rank, np.finfo(dtype))
        with np.errstate(all="ignore"):
            expected = collective(strategy, value)
        with np.errstate(all=mode), warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                same(collective(strategy, value), expected)
            # Outside of collectives they are the program's own
            assert set(np.geterr().values()) == {mode}


MORE = {
    "reduce of dict": lambda s, x: s.reduce("SUM", {"a": x, "b": x[:10]}),
    "reduce of rows": lambda s, x: s.reduce("MEAN", x.reshape(2, -1), axis=0),
    "reduce of large integers": lambda s, x: s.reduce(
        "SUM", np.full(x.size, 2**62 // s.num_replicas_in_sync)
    ),
    "gather of columns": lambda s, x: s.gather(x.reshape(4, -1), axis=1),
    "gather of two": lambda s, x: s.gather([x, x], axis=0),
    "all_to_all of columns": lambda s, x: COLLECTIVES["all_to_all"](
        s, x.reshape(-1, 4).T
    ),
}
OPS = [None, mpidist.HierarchicalCopyAllReduce, mpidist.ReductionToOneDevice]


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("name", [*COLLECTIVES, *MORE])
def test_a_lack_of_memory_is_an_error_on_all_ranks(comm, name, ops, make_strategy):
    if name == "gradient_buckets" or (ops and "reduce" not in name):
        pytest.skip("starts a thread, or does not use it")
    strategy = make_strategy(["CPU:0"], cross_device_ops=ops and ops())
    call, former = {**COLLECTIVES, **MORE}[name], resource.getrlimit(resource.RLIMIT_AS)
    for dtype, arrays in itertools.product(["f2", "f8"], [0.3, 1.3, 2.2, 3.3, 4.6]):
        value = np.ones(400_000, dtype)
        used = int(Path("/proc/self/statm").read_text().split()[0])
        limit = used * resource.getpagesize() + int(arrays * value.nbytes)
        if comm.rank == comm.size - 1:
            resource.setrlimit(resource.RLIMIT_AS, (limit, former[1]))
        try:
            call(strategy, value)
            failed = False
        except MemoryError:
            failed = True
        finally:
            resource.setrlimit(resource.RLIMIT_AS, former)
        assert comm.allgather(failed) == [failed] * comm.size
        assert strategy.reduce("SUM", 1.0) == comm.size
