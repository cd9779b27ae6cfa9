"""After a strategy or MPI was finalized, all that communicates raises ContextError."""

import importlib.util

import pytest

# Uses each public member of objects that were made before, with these arguments
SCRIPT = """
import inspect, sys, tempfile
import numpy as np
from mpi4py import MPI
import mpidist
from mpidist import statistics as stats

strategy = mpidist.MirroredStrategy(["CPU:0"])
folder = strategy.broadcast_object(tempfile.mkdtemp())
rows = mpidist.Dataset.range(8).batch(4)
with strategy.scope():
    mean = mpidist.VariableAggregation.MEAN
    on_read = mpidist.VariableSynchronization.ON_READ
    w = mpidist.Variable(np.zeros(3), aggregation=mean)
    n = mpidist.Variable(0.0, synchronization=on_read, aggregation=mean)
checkpoint = mpidist.Checkpoint(w=w, strategy=strategy)
manager = mpidist.CheckpointManager(checkpoint, f"{folder}/run", 2)
path, data = manager.save(), strategy.experimental_distribute_dataset(rows.cache())
iterator = iter(data)
next(iterator)
things = [
    *(strategy, strategy.extended, strategy.extended.cross_device_ops, w, n),
    *(checkpoint, manager, data, iterator, strategy.make_dataset_iterator(rows)),
    mpidist.PreemptionCheckpointHandler(None, manager),
    mpidist.Hdf5Writer(strategy, f"{folder}/out.h5"),
    strategy.gradient_buckets({"w": np.zeros(3)}),
    *(stats.Moments(strategy=strategy), stats.Quantiles(strategy=strategy)),
    stats.Histogram([0.0, 1.0], strategy=strategy),
    stats.ConfusionMatrix(2, strategy=strategy),
    strategy.timeline(f"{folder}/timeline"),
]
x, one = np.ones(3), mpidist.IndexedSlices(np.ones(1), np.zeros(1, int))
given = dict(args=(), kwargs=None, options=None) | dict(
    reduce_op="SUM", op=mpidist.ReduceOp.SUM, value=x, values=[x], axis=0, root=0,
    fn=lambda *_: 1.0, merge_fn=lambda *_: 1.0, value_fn=lambda _: 1.0, tensor=x,
    dataset=rows, dataset_fn=lambda _: rows, input_fn=lambda _: rows, variable=w,
    destinations="CPU:0", value_destination_pairs=[(x, "CPU:0")], per_replica_value=x,
    var=w, v=w, delta=x, sparse_delta=one, indices=[[0]], updates=[1.0], batch=x,
    batch_scatter=one, array=x, file_prefix=f"{folder}/x", save_path=path, obj=1,
    folder=folder, timeout_seconds=None, initial_state=0, reduce_func=lambda a, b: a,
    key="w", like={"w": x}, state=iterator.get_state(), operation="x", call=None,
    colocate_with_variable=w, colocate_with=w, var_list=[w], rows=x, labels=[0],
    predictions=[0], numpy_input=x, iterator=iterator, iterations=1, config_proto={},
    others=[], shape=(), dtype=float, q=0.5, find_index=lambda _: folder,
    distributed_train_function=lambda: 1.0,
)

def use(member):
    taken = inspect.signature(member).parameters.values()
    needed = [p for p in taken if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    made = member(*[given[p.name] for p in needed])
    if hasattr(made, "__enter__"):
        with made:
            pass

def attempt(name, fn, *args):
    try:
        fn(*args)
        said = "done"
    except mpidist.ContextError:
        said = "refused"
    except Exception as error:
        said = repr(error)
    if is_first:
        print(name, said, sep=": ", flush=True)

is_first = strategy.extended.replica_id == 0
"""
FINISH = """
if sys.argv[1] == "MPI":
    MPI.Finalize()
    attempt("a new strategy", mpidist.MirroredStrategy)
else:
    strategy.experimental_finalize()
"""
WALK = """
for thing in things:
    names = [name for name in dir(thing) if name[0] != "_"]
    for name in [*names, "__enter__", "__iter__", "__next__"]:
        try:
            member = getattr(thing, name)
        except (AttributeError, mpidist.MpidistError):
            continue
        if inspect.isroutine(member) and not inspect.isclass(inspect.unwrap(member)):
            attempt(f"{type(thing).__name__}.{name}", use, member)
"""
WRAPPERS = """
import jax, torch
import mpidist.jax as mj, mpidist.torch as mt

def backward():
    model(torch.ones(2, 3)).sum().backward()

def new_model():
    with strategy.scope():
        return mt.DistributedDataParallel(torch.nn.Linear(3, 1))

model = new_model()
with strategy.scope():
    norm = mt.SyncBatchNorm(3)
square = mj.value_and_grad(lambda w, x: (w * x).mean(), strategy=strategy)
tensors = mt.as_tensors(strategy.experimental_distribute_dataset(rows))
jaxes = mj.as_jax(strategy.experimental_distribute_dataset(rows))
backward()
"""
USE_WRAPPERS = """
for name, fn in {
    "backward": backward, "norm": lambda: norm(torch.ones(2, 3)),
    "new model": new_model,
    "grad": lambda: square(1.0, x), "jit": lambda: jax.jit(square)(1.0, x),
    "all_reduce": lambda: mj.all_reduce("SUM", x, strategy=strategy),
    "all_gather": lambda: mj.all_gather(x, 0, strategy=strategy),
    "broadcast": lambda: mj.broadcast(x, strategy=strategy),
    "tensors": lambda: next(iter(tensors)), "jaxes": lambda: next(iter(jaxes)),
}.items():
    attempt(name, fn)
"""
# What needs no other rank works still, or has arguments that are refused anyway
LOCAL = {
    "MirroredStrategy": "colocate_vars_with configure experimental_finalize "
    "experimental_local_results experimental_make_numpy_dataset group scope statistics "
    "unwrap update_config_proto",
    "StrategyExtendedV1": "close colocate_vars_with experimental_make_numpy_dataset "
    "new_number non_slot_devices read_var recorders_beside register update "
    "update_non_slot use_device value_container variable_created_in_scope zeros "
    "end_all",
    "MpiAllReduce": "bind close describe is_sum unbound batch_reduce_implementation "
    "reduce_implementation sum_arrays",
    "Variable": "gather_nd get_shape is_initialized numpy read_value ref replace_local "
    "sparse_read value __iter__ batch_scatter_update scatter_div scatter_max "
    "scatter_min scatter_mul scatter_nd_update scatter_update scatter_add scatter_sub "
    "scatter_nd_add scatter_nd_sub",
    "DistributedDataset": "from_function of_global_batches",
    "DistributedIterator": "abandon close get_state __iter__",
    "InputIterator": "close",
    "PreemptionCheckpointHandler": "close watch_preemption_scope",
    "GradientBuckets": "close",
    "_GeneratorContextManager": "func",
    "Moments": "merge_state reset_state set_state update_state",
    "Quantiles": "merge_state reset_state set_state update_state",
    "Histogram": "merge_state reset_state set_state update_state",
    "ConfusionMatrix": "merge_state reset_state set_state update_state",
}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("what", ["strategy", "MPI"])
def test_what_communicates_is_refused_after_the_end(mpirun, ranks, what):
    ended = mpirun(ranks, SCRIPT + FINISH + WALK, what)
    said = [line.partition(": ") for line in ended.stdout.splitlines()]
    refused = {name for name, _, how in said if how == "refused"}
    local = {f"{kind}.{n}" for kind, names in LOCAL.items() for n in names.split()}
    others = {f"{name}: {how}" for name, _, how in said if how != "refused"}
    unlisted = {text for text in others if text.partition(": ")[0] not in local}
    assert not unlisted
    assert {"MirroredStrategy.reduce", "Checkpoint.write", "Variable.assign"} < refused
    assert {"CheckpointManager.wait", "_GeneratorContextManager.__enter__"} < refused
    assert (what == "MPI") == ("a new strategy" in refused)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "jax"))), reason="needs both"
)
@pytest.mark.parametrize("what", ["strategy", "MPI"])
def test_wrappers_of_other_libraries_are_refused_too(mpirun, what):
    ended = mpirun(2, SCRIPT + WRAPPERS + FINISH + USE_WRAPPERS, what)
    done = {line for line in ended.stdout.splitlines() if ": refused" not in line}
    # A model communicates by a process group of PyTorch, which outlives the strategy
    assert done == ({"backward: done"} if what == "strategy" else set())
