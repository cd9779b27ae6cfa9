"""Every dtype on every path: NumPy's value, or an error by name on all ranks."""
import functools
import numpy as np
import h5py
import pytest
import all_dtypes
from all_dtypes import DTYPES, rows, is_like
import mpidist
from mpidist import Dataset
from all_ranks import mine

OPS = {"SUM": np.add, "MEAN": np.add, "MIN": np.minimum, "MAX": np.maximum, "PRODUCT": np.multiply}

def reduced(op, parts, axis=None):
    dtype = parts[0].dtype
    kind = np.clongdouble if dtype.kind == "c" else np.longdouble
    if dtype.kind == "b" or dtype.kind in "SUVOTmM" and dtype.name != "bfloat16": return None
    if dtype.num>255 and dtype.name != "bfloat16": return None
    total = functools.reduce(OPS[op], [p.astype(kind) for p in parts])
    n = len(parts)
    if axis is not None:
        total = OPS[op].reduce(np.stack([p.astype(kind) for p in parts]).reshape(-1, *parts[0].shape[1:]))
        n = n * len(parts[0])
    if op == "MEAN":
        total = total / n
        dtype = np.dtype(float) if dtype.kind in "iu" else dtype
    return np.asarray(total).astype(nb(dtype))

def reduce(op, axis):
    def act(strategy, array, folder):
        return strategy.reduce(op, array, axis) if axis is not None else strategy.reduce(op, array)
    return act, lambda parts, rank: reduced(op, parts, axis)

def all_of(parts, rank): return np.concatenate(parts)
def first(parts, rank): return parts[0]
def own(parts, rank): return parts[rank]

def gather(strategy, array, folder): return strategy.gather(array, 0)
def gather_large(strategy, array, folder): return strategy.gather(np.tile(array, 30000), 0)
def gather_ax1(strategy, array, folder): return strategy.gather(array.reshape(2,2), 1)
def objects(strategy, array, folder): return np.concatenate([o["x"] for o in strategy.gather_objects({"x": array})])
def broadcast_object(strategy, array, folder): return strategy.broadcast_object({"x": array})["x"]
def broadcast_scalar(strategy, array, folder): return np.array([strategy.broadcast_object(array[0])]) if array[0].__class__ not in (str,) else array[:1]
def broadcast(strategy, array, folder): return strategy.broadcast(array)
def variable(strategy, array, folder):
    with strategy.scope():
        v = mpidist.Variable(array)
    return np.asarray(v)
def variable_mean(strategy, array, folder):
    with strategy.scope():
        v = mpidist.Variable(array, aggregation=mpidist.VariableAggregation.MEAN)
    strategy.run(lambda: v.assign(array))
    return v.numpy()
def exchange(strategy, array, folder):
    n = strategy.num_replicas_in_sync
    x = np.tile(array, n)
    return strategy.experimental_local_results(strategy.run(lambda: mpidist.get_replica_context().all_to_all(x)))[0]
def scatter(strategy, array, folder):
    n = strategy.num_replicas_in_sync
    x = np.tile(array, n)
    return strategy.experimental_local_results(strategy.run(lambda: mpidist.get_replica_context().reduce_scatter("SUM", x)))[0]
def save(strategy, array, folder):
    array = strategy.broadcast(array) if False else rows(array.dtype)
    path = mpidist.Checkpoint(strategy=strategy, w=array).save(folder / "ckpt")
    c = mpidist.Checkpoint(strategy=strategy, w=np.zeros_like(array))
    c.restore(path)
    return c.w
def writer(strategy, array, folder):
    with mpidist.Hdf5Writer(strategy, folder / "rows.h5") as w:
        w.append({"x": array})
    data = Dataset.from_hdf5(folder / "rows.h5", "x").batch(100)
    return next(iter(data))
def writer_h5py(strategy, array, folder):
    with mpidist.Hdf5Writer(strategy, folder / "rows.h5") as w:
        w.append({"x": array})
    with h5py.File(folder / "rows.h5") as f:
        return f["x"][:]
def data(strategy, array, folder):
    d = Dataset.from_tensor_slices(rows(array.dtype)).map(lambda x: x).cache().batch(4).map(lambda x: x)
    return next(iter(d))
def data_dist(strategy, array, folder):
    d = Dataset.from_tensor_slices(rows(array.dtype)).map(lambda x: x).cache().repeat(2).batch(4).map(lambda x: x)
    d = list(mpidist.as_arrays(strategy.experimental_distribute_dataset(d)))
    return d
def moments(strategy, array, folder):
    return strategy.statistics_of(array).mean
def maximum(strategy, array, folder):
    return np.asarray(strategy.statistics_of(array).maximum)
def histogram(strategy, array, folder):
    h = mpidist.statistics.Histogram(4, (0, 4), strategy=strategy)
    h.update_state(array)
    return h.result().counts
def quantiles(strategy, array, folder):
    q = mpidist.statistics.Quantiles(strategy=strategy)
    q.update_state(array)
    return np.round(q.result([0, .5, 1])).astype(int)
def real(parts):
    return parts[0].dtype.kind in "iufb" and parts[0].dtype.num < 256 or parts[0].dtype.name == "bfloat16"
def DIST(p, r):
    a = rows(p[0].dtype); n = len(p); k = -(-4 // n)
    return [a[r*k:(r+1)*k]]*2
PATHS = {f"{op} {axis}": reduce(op, axis) for op in OPS for axis in (None, 0)}
PATHS |= {
 "gather": (gather, all_of), "gather_ax1": (gather_ax1, lambda p, r: np.concatenate([x.reshape(2,2) for x in p], 1)), "gather_large": (gather_large, lambda p,r: np.concatenate([np.tile(x, 30000) for x in p])),
 "gather_objects": (objects, all_of),
 "broadcast_object": (broadcast_object, first), "broadcast_scalar": (broadcast_scalar, lambda p, r: p[0][:1]),
 "broadcast": (broadcast, first),
 "variable": (variable, first),
 "variable_mean": (variable_mean, lambda p, r: reduced("MEAN", p)),
 "exchange": (exchange, lambda p, r: np.concatenate(p)),
 "reduce_scatter": (scatter, lambda p, r: reduced("SUM", p)),
 "save": (save, lambda p, r: rows(p[0].dtype)),
 "writer": (writer, all_of), "writer_h5py": (writer_h5py, all_of),
 "data": (data, lambda p, r: rows(p[0].dtype)),
 "data_dist": (data_dist, lambda p, r: DIST(p, r)),
 "moments": (moments, lambda p, r: np.asarray(np.concatenate(p).astype(float).mean()) if real(p) else None),
 "maximum": (maximum, lambda p, r: np.concatenate(p).max() if real(p) else None),
 "histogram": (histogram, lambda p, r: np.histogram(np.concatenate(p).astype(float), 4, (0,4))[0] if real(p) else None),
 "quantiles": (quantiles, lambda p, r: np.quantile(np.concatenate(p).astype(float), [0,.5,1], method="lower").astype(int) if real(p) else None),
}
import collections, traceback, os
FOUND = collections.defaultdict(list)

def nb(d): return d if d.kind=="T" else d.newbyteorder("=")

def run_one(strategy, comm, folder, path, name):
    act, oracle = PATHS[path]
    dtype = DTYPES[name]
    array = rows(dtype, strategy.rank)
    if dtype.hasobject: parts=[rows(dtype, r) for r in range(comm.size)]
    else: parts = [rows(dtype, r) for r in range(comm.size)]
    try:
        got = act(strategy, array, folder)
    except mpidist.MpidistError as e:
        text = str(e)
        named = any(t in text for t in (str(dtype), dtype.name, str(nb(dtype)), nb(dtype).name))
        return "refused" if named else f"unnamed {type(e).__name__} {text[:150]}"
    except BaseException as e:
        return f"ESCAPED {type(e).__name__}: {str(e)[:150]}"
    want = oracle(parts, comm.rank)
    if want is None: return f"WRONG no value, got {got!r}"[:200]
    if path == "data_dist":
        return "ok" if len(got) == len(want) and all(map(is_like, got, want)) else f"WRONG {got} {want}"[:300]
    got = np.asarray(got)
    want = np.asarray(want)
    if path == "moments": return "ok" if np.allclose(got, want) else f"WRONG {got} {want}"
    if path in ("histogram", "quantiles"): return "ok" if (got==want).all() else f"WRONG {got} {want}"
    if "MEAN" in path or "mean" in path:
        return "ok" if got.dtype == want.dtype and np.allclose(got.astype(complex), want.astype(complex), rtol=1e-2) else f"WRONG {got} {want}"
    if not is_like(got, want) and path == "maximum": return f"WRONG {got!r} {want!r}"
    return "ok" if is_like(got, want) else f"WRONG {got!r} {want!r}"[:300]

@pytest.mark.parametrize("path", PATHS)
def test_paths(comm, make_strategy, tmp_path_factory, path):
    out = {}
    strategy = make_strategy()
    for name in DTYPES:
        folder = comm.bcast(tmp_path_factory.mktemp("x"))
        res = run_one(strategy, comm, folder, path, name)
        all_res = comm.allgather(res)
        alive = True
        try:
            strategy.reduce("SUM", 1)
        except BaseException as e:
            all_res = [r + " BROKEN" for r in all_res]; 
            strategy = make_strategy()
        out[name] = all_res
    if comm.rank == 0:
        with open(os.environ["OUTF"], "a") as f:
            for name, res in out.items():
                if len(set(r.split()[0] for r in res)) > 1: f.write(" ".join(f"{path} | {name} | DIFFER {res}".split())+"\n")
                else: f.write(" ".join(f"{path} | {name} | {res[0]}".split())+"\n")
