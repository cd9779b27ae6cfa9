"""Every dtype on every path: NumPy's value, or an error by name on all ranks."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import h5py
import numpy as np
import pytest
from all_dtypes import DTYPES, ML, NATIVE, is_like, rows
from all_ranks import local, require_usable

import mpidist
from mpidist import Dataset
from mpidist import VariableAggregation as Aggregation

UFUNCS = {"MIN": np.minimum, "MAX": np.maximum, "PRODUCT": np.multiply}
OPS = ["SUM", "MEAN", *UFUNCS]
UNSENT = {"object", "object field", "rational", "StringDType", "StringDType with None"}
SENT = DTYPES.keys() - UNSENT
NUMBERS = {name for name in NATIVE if name[1:] != "bool"} | {"bfloat16"}
ORDERED = {name for name in NUMBERS if "complex" not in name}
REAL = {name for name in ORDERED if "128" not in name} | {"=bool", ">bool"}
# What HDF5 has in each of its versions, and h5py
IN_HDF5 = {name for name in NATIVE if not {"128", "256"} & {name[-3:]}} | {"S3", "V3"}
IN_HDF5 |= {"fields", "fields in another order", "aligned", "nested", "subarrays"}
ROUNDED = {name.strip("<>=") for name in NUMBERS if "int" not in name}
SAVED = IN_HDF5 | ML.keys() | {"M8[s]", ">M8[ms]", "m8[5us]", "M8", "U2", ">U2"}


REFUSALS = {"DTypeError", "ArgumentTypeError", "ArgumentError", "DataError"}


class Path(NamedTuple):
    """A way of an array through the library.

    Args:
      act: given a strategy, this rank's array and a folder, returns an array.
      want: given the arrays of all ranks and this rank, returns that of NumPy.
      takes: the names of the dtypes that are no error; of others, most are.
    """

    act: Callable[..., Any]
    want: Callable[..., Any]
    takes: Any


def reduced(op, parts, axis=None):
    """Reduce arrays with so many bits that nothing is rounded before the end."""
    dtype = parts[0].dtype.newbyteorder("=")
    wide = np.clongdouble if dtype.kind == "c" else np.longdouble
    every = np.stack([part.astype(wide) for part in parts])
    if axis is not None:
        every = every.reshape(-1)
    total = UFUNCS.get(op, np.add).reduce(every)
    if op == "MEAN":
        total = total / len(every)
        dtype = np.dtype(float) if dtype.kind in "iu" else dtype
    return np.asarray(total).astype(dtype)


def reduce(op, axis):
    def act(strategy, array, folder):
        return np.asarray(strategy.reduce(op, array, axis))

    takes = ORDERED if op in ("MIN", "MAX") else NUMBERS
    return Path(act, lambda parts, rank: reduced(op, parts, axis), takes)


def reduce_large(strategy, array, folder):
    found = strategy.reduce("SUM", {"x": np.tile(array, 9000), "y": 1.0})["x"]
    assert (found.reshape(9000, -1) == found[:4]).all()
    return found[:4]


def in_replica(name, *options):
    def act(strategy, array, folder):
        array = np.tile(array, strategy.size)
        context = mpidist.get_replica_context
        return local(
            strategy, strategy.run(lambda: getattr(context(), name)(*options, array))
        )

    return act


def variable(strategy, array, folder, aggregation=None):
    with strategy.scope():
        made = mpidist.Variable(array, aggregation=aggregation or Aggregation.NONE)
    if aggregation:
        strategy.run(lambda: made.assign(array))
    return np.array([made[i] for i in range(len(array))], made.dtype)


def save(strategy, array, folder):
    path = mpidist.Checkpoint(strategy=strategy, w=array).save(folder / "w")
    checkpoint = mpidist.Checkpoint(strategy=strategy, w=np.zeros_like(array))
    checkpoint.restore(path)
    return checkpoint.w


def save_each(strategy, array, folder):
    value = mpidist.PerReplica((array,), (strategy.rank,))
    path = mpidist.Checkpoint(strategy=strategy, w=value).save(folder / "w")
    value = mpidist.PerReplica((np.zeros_like(array),), (strategy.rank,))
    checkpoint = mpidist.Checkpoint(strategy=strategy, w=value)
    checkpoint.restore(path)
    return local(strategy, checkpoint.w)


def write(strategy, array, folder):
    with mpidist.Hdf5Writer(strategy, folder / "rows.h5", overwrite=True) as writer:
        writer.append({"x": array})
    with h5py.File(folder / "rows.h5") as file:
        by_h5py = file["x"][:]
    (read,) = Dataset.from_hdf5(folder / "rows.h5", "x").batch(100)
    assert is_like(read, by_h5py)
    return read


def pipeline(strategy, array, folder):
    data = Dataset.from_tensor_slices(array).map(lambda x: x).cache().repeat(2)
    (_, batch) = data.batch(4).map(lambda x: x)
    return batch


def distributed(strategy, array, folder):
    data = Dataset.from_tensor_slices(array).cache().batch(4).repeat(2)
    (_, batch) = mpidist.as_arrays(strategy.experimental_distribute_dataset(data))
    return batch


def split(array, ranks, rank):
    length = -(-len(array) // ranks)
    return array[rank * length : (rank + 1) * length]


def moments(strategy, array, folder):
    found = strategy.statistics_of(array)
    return np.stack([found.mean, found.minimum, found.maximum]).astype(float)


def histogram(strategy, array, folder):
    found = mpidist.statistics.Histogram(4, (0, 4), strategy=strategy)
    found.update_state(array)
    return found.result().counts


def quantiles(strategy, array, folder):
    found = mpidist.statistics.Quantiles(strategy=strategy)
    found.update_state(array)
    return np.rint(found.result([0.0, 0.5, 1.0]))


def of_floats(*functions):
    """Apply NumPy's functions to the rows of all ranks."""

    def want(parts, rank):
        every = np.concatenate(parts).astype(float)
        return np.array([function(every) for function in functions], float)

    return want


def one(scalar, dtype):
    made = np.zeros(1, dtype)
    made[0] = scalar
    return made


def every(parts, rank):
    return np.concatenate(parts)


def first(parts, rank):
    return parts[0]


COUNT = functools.partial(np.histogram, bins=4, range=(0, 4))
QUANTILES = functools.partial(np.quantile, q=[0, 0.5, 1], method="lower")
PATHS = {
    **{f"{op} {axis}": reduce(op, axis) for op in OPS for axis in (None, 0)},
    "SUM of large arrays": Path(
        reduce_large, lambda parts, rank: reduced("SUM", parts), NUMBERS
    ),
    "reduce_scatter": Path(
        in_replica("reduce_scatter", "SUM"),
        lambda parts, rank: reduced("SUM", parts),
        NUMBERS,
    ),
    "all_to_all": Path(in_replica("all_to_all"), every, SENT),
    "gather": Path(lambda s, array, _: s.gather(array, 0), every, SENT),
    "gather of large arrays": Path(
        lambda s, array, _: s.gather([np.tile(array, 9000)] * 2, 0)[1],
        lambda parts, rank: np.concatenate([np.tile(part, 9000) for part in parts]),
        SENT,
    ),
    "gather, axis 1": Path(
        lambda s, array, _: s.gather(array.reshape(2, 2), 1),
        lambda parts, rank: np.hstack([part.reshape(2, 2) for part in parts]),
        SENT,
    ),
    "gather_objects": Path(
        lambda s, array, _: np.concatenate(
            [x["x"] for x in s.gather_objects({"x": array})]
        ),
        every,
        SENT,
    ),
    "broadcast": Path(lambda s, array, _: s.broadcast(array), first, SENT),
    "broadcast_object": Path(
        lambda s, array, _: s.broadcast_object([array, array[:0]])[0], first, SENT
    ),
    "objects that are scalars": Path(
        lambda s, array, _: one(s.gather_objects(array[0])[0], array.dtype),
        lambda parts, rank: parts[0][:1],
        SENT - {"S3", "U2", ">U2", "S0", "U0"},
    ),
    "symmetric_like": Path(
        lambda s, array, _: s.symmetric_like([array])[0],
        lambda parts, rank: np.zeros_like(parts[0]),
        SENT,
    ),
    "Variable": Path(variable, first, SENT),
    "Variable, MEAN": Path(
        functools.partial(variable, aggregation=Aggregation.MEAN),
        lambda parts, rank: reduced("MEAN", parts),
        {name for name in NUMBERS if "int" not in name},
    ),
    "Checkpoint": Path(
        lambda s, array, folder: save(s, rows(array.dtype), folder),
        lambda parts, rank: rows(parts[0].dtype),
        SAVED,
    ),
    "Checkpoint, PerReplica": Path(save_each, lambda parts, rank: parts[rank], SAVED),
    "Hdf5Writer": Path(write, every, IN_HDF5),
    "Dataset": Path(pipeline, lambda parts, rank: parts[rank], SENT - {"no fields"}),
    "distributed Dataset": Path(
        lambda s, array, _: distributed(s, rows(array.dtype), _),
        lambda parts, rank: split(rows(parts[0].dtype), len(parts), rank),
        SENT - {"no fields"},
    ),
    "Moments": Path(moments, of_floats(np.mean, np.min, np.max), REAL),
    "Histogram": Path(
        histogram, lambda p, _: COUNT(np.concatenate(p).astype(float))[0], REAL
    ),
    "Quantiles": Path(
        quantiles, lambda parts, rank: of_floats(QUANTILES)(parts, 0)[0], REAL
    ),
}


def outcome(strategy, path, array, parts, folder):
    """Return "value", the error's class if that names the dtype, or what is wrong."""
    try:
        got = path.act(strategy, array, folder)
    except mpidist.MpidistError as error:
        names = {str(array.dtype), array.dtype.name, f"type {type(array[0]).__name__}"}
        if array.dtype.kind != "T":
            names.add(str(array.dtype.newbyteorder("=")))
        is_named = any(name in str(error) for name in names)
        return (
            type(error).__name__ if is_named else f"{error!r} does not name the dtype"
        )
    want = path.want(parts, strategy.rank)
    if got.dtype.name in ROUNDED and got.shape == want.shape:
        precision = 1e-2 if got.dtype.itemsize == 2 else 1e-6
        if np.allclose(got.astype("G"), want.astype("G"), precision, 0):
            want = got if got.dtype == want.dtype.newbyteorder("=") else want
    return "value" if is_like(got, want) else f"{got!r} is not {want!r}"


@pytest.mark.parametrize("path", PATHS)
def test_every_dtype_gives_the_value_of_numpy_or_an_error_by_name(
    strategy, comm, tmp_path, path
):
    folder, outcomes, wrong = comm.bcast(tmp_path), {}, {}
    for name, dtype in DTYPES.items():
        array = rows(dtype, comm.rank)
        parts = [rows(dtype, rank) for rank in range(comm.size)]
        outcomes[name] = outcome(strategy, PATHS[path], array, parts, folder)
    for name, *found in zip(DTYPES, *map(dict.values, comm.allgather(outcomes))):
        is_refused = set(found) <= REFUSALS and name not in PATHS[path].takes
        if not is_refused and set(found) != {"value"}:
            wrong[name] = found
    assert not wrong
    require_usable(strategy)


@pytest.mark.parametrize("name", ["int1", "uint2", "int4", "int8", "int16"])
@pytest.mark.parametrize("value", [70000, -70000, 1.5, np.float32(0.5)])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_what_a_narrow_integer_does_not_hold_is_refused(strategy, name, value, shape):
    dtype = ML[name] if name in ML else np.dtype(name)
    array = np.full(shape, value)
    with strategy.scope():
        made = mpidist.Variable(np.zeros(shape).astype(dtype))
        for new in [array, value] if shape == () else [array]:
            with pytest.raises(mpidist.DTypeError, match=name):
                made.assign(new)
        if abs(value) > 2:
            with pytest.raises(mpidist.DTypeError, match=name):
                mpidist.Variable(array, dtype=dtype)
        made.assign(np.zeros(shape, int))
    assert made.dtype == dtype


class Length(np.ndarray):
    """Lengths with a unit, which NumPy keeps in slices, copies and results."""

    unit = "m"


class Wrapper:
    """An object of another library that becomes an array without a word."""

    def __init__(self, data):
        self._data = data
        self.dtype, self.shape, self.ndim = data.dtype, data.shape, data.ndim

    @property
    def data(self):
        return self._data

    def __array__(self, dtype=None, copy=None):
        # Perhaps with a mask, as of netCDF4's variables
        return np.asanyarray(self._data)

    def __getitem__(self, key):
        return type(self)(self._data[key])

    def __len__(self):
        return len(self._data)


class Quantity(Wrapper):
    units = "km"


def masked(array):
    return np.ma.masked_array(array, array == 3)


MEANINGS = {
    "a unit": lambda array: array.view(Length),
    "a mask": masked,
    "nothing masked": np.ma.masked_array,
    "another product": lambda array: array.view(np.matrix),
    "a unit of another library": Quantity,
    "a unit inside": lambda array: Wrapper(Quantity(array)),
    "a mask inside": lambda array: Wrapper(masked(array)),
}


def take_slices(strategy, value, folder):
    with strategy.scope():
        made = mpidist.Variable(np.zeros((4, 2)), aggregation=Aggregation.SUM)
    strategy.run(lambda: made.scatter_add(mpidist.IndexedSlices(value, np.arange(2))))


def put(strategy, value, folder):
    with strategy.gradient_buckets({"x": np.ones((2, 2))}) as buckets:
        buckets.put("x", value)


def assign(strategy, value, folder):
    with strategy.scope():
        made = mpidist.Variable(np.zeros((2, 2)), aggregation=Aggregation.SUM)
    strategy.run(lambda: made.assign([*value]))


def append(strategy, value, folder):
    with mpidist.Hdf5Writer(strategy, folder / "rows.h5", overwrite=True) as writer:
        try:
            writer.append({"x": value})
        finally:
            writer.append({"x": np.ones((2, 2))})


def batches(make):
    """Read the one batch of a dataset whose rows `make` gives."""

    def act(strategy, value, folder):
        data = make(value).batch(2)
        list(mpidist.as_arrays(strategy.experimental_distribute_dataset(data)))

    return act


# Of two rows and columns: SUM, gather and the like go through the same conversion
USES = {
    "reduce": lambda s, x, _: s.reduce("SUM", x),
    "reduce of a nest": lambda s, x, _: s.reduce(
        "MAX", {"a": 1.0, "x": [x]}, axis=None
    ),
    "reduce, axis 0": lambda s, x, _: s.reduce("MEAN", x, axis=0),
    "all_reduce": lambda s, x, _: s.run(
        lambda: mpidist.get_replica_context().all_reduce("SUM", x)
    ),
    "all_to_all": lambda s, x, _: s.run(
        lambda: mpidist.get_replica_context().all_to_all(x)
    ),
    "gather": lambda s, x, _: s.gather(x, axis=0),
    "gather_objects": lambda s, x, _: s.gather_objects({"x": x}),
    "broadcast": lambda s, x, _: s.broadcast(x),
    "broadcast_object": lambda s, x, _: s.broadcast_object([x]),
    "Variable": lambda s, x, _: variable(s, x, _),
    "Variable of a list": lambda s, x, _: variable(s, [x, x], _),
    "assign": assign,
    "scatter_add": take_slices,
    "gradient_buckets": put,
    "symmetric_like": lambda s, x, _: s.symmetric_like(x),
    "Checkpoint": lambda s, x, folder: mpidist.Checkpoint(strategy=s, w=x).save(
        folder / "w"
    ),
    "Checkpoint, PerReplica": lambda s, x, folder: mpidist.Checkpoint(
        strategy=s, w=mpidist.PerReplica((x,), (s.rank,))
    ).save(folder / "w"),
    "Hdf5Writer": append,
    "statistics_of": lambda s, x, _: s.statistics_of(x),
    "Histogram": lambda s, x, _: mpidist.statistics.Histogram(
        2, (0, 1), strategy=s
    ).update_state(x),
    "from_tensor_slices": batches(Dataset.from_tensor_slices),
    "map": batches(lambda x: Dataset.range(2).map(lambda i: x)),
    "map to lists": batches(lambda x: Dataset.range(2).map(lambda i: [x, x])),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("meaning", MEANINGS)
def test_an_array_with_a_meaning_is_refused_by_name_everywhere(
    strategy, comm, tmp_path, use, meaning
):
    value = MEANINGS[meaning](np.array([[1.0, 2.0], [3.0, 4.0]]))
    names = "mask|Length|Quantity|Wrapper|matrix"
    with pytest.raises(mpidist.MpidistError, match=names):
        USES[use](strategy, value, comm.bcast(tmp_path))
    require_usable(strategy)


@pytest.mark.parametrize("use", USES)
def test_a_memory_map_is_an_array(strategy, comm, tmp_path, use):
    value = np.memmap(tmp_path / "x", float, "w+", shape=(2, 2))
    USES[use](strategy, value, comm.bcast(tmp_path))
    require_usable(strategy)
