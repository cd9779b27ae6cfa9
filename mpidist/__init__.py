"""The tf.distribute programming model for MPI clusters, without TensorFlow.

For programs in NumPy or CuPy, started by `mpirun` or `srun`, that train or compute on
many processors with the results of one: synchronous, exact data parallelism. A mistake
that would hang the job raises an error on every rank.

The model
=========

One MPI rank is one replica: one GPU (CuPy arrays) or one share of the CPU (NumPy
arrays). Every rank runs the same script and creates one `MirroredStrategy`.

Replica context is inside a function that `strategy.run` runs: you see this replica's
arrays, and `get_replica_context()` has the collectives `all_reduce` and `all_gather`.
Cross-replica context is in `strategy.scope()` or outside `run`: you see values of all
replicas. `PerReplica` values differ (`strategy.reduce` or `strategy.gather` them);
mirrored values, such as variables, are equal.

A dataset is batched by the global batch size. A batch of n rows is cut into slices of
ceil(n / replicas) rows; the last replicas may get fewer rows, or none. Therefore
compute means with `strategy.reduce("MEAN", per_row_values, axis=0)`, which counts rows,
not replicas.

Calls that communicate are collective: every rank makes them, in the same order. If the
ranks' calls or arguments differ, or a replica's function raises, all ranks raise, and
the message says which rank did what. `help(mpidist.errors)` lists the exceptions.

A complete script, for `mpirun -n 4 python fit.py`, that prints the same on any number
of ranks::

    import numpy as np
    import mpidist

    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        w = mpidist.Variable(np.zeros(3), aggregation=mpidist.VariableAggregation.SUM)

    x = np.random.default_rng(0).normal(size=(64, 3))
    rows = mpidist.Dataset.from_tensor_slices((x, x @ [1.0, 2.0, 3.0]))
    data = rows.shuffle(seed=0).batch(16).repeat(20)  # 16 is the global batch


    def step(x, y):  # runs on every replica, with its rows of the batch
        error = x @ w - y
        w.assign_sub(0.1 / 16 * x.T @ error)  # summed over the replicas
        return error**2


    for batch in strategy.experimental_distribute_dataset(data):
        loss = strategy.reduce("MEAN", strategy.run(step, args=batch), axis=0)
    if strategy.is_first:
        print(f"w = {w.numpy().round(3)}, loss = {loss:.6f}")

`help(mpidist.Dataset)` describes one name. Examples in docstrings (lines with `>>>`)
use the names `np` (numpy), `mpidist`, and `strategy = mpidist.MirroredStrategy()` with
2 replicas on CPUs. Outputs are those of replica 0; a comment says so if the replicas'
outputs differ.

Names
=====

The left column is the name in TensorFlow, without `tf.distribute.` or
`tf.distribute.experimental.`; the right column says what differs in `mpidist`. The name
is the same, unless a different name stands before a colon.

Strategies and contexts

    Strategy                    every rank calls its methods; with rank, size, is_first
    MirroredStrategy            one replica per rank, on one node or many; `devices` is
                                indexed by the rank on its node; `communicator` is new
    tf.compat.v1's Strategy     StrategyV1, which MirroredStrategy is too: with
                                make_dataset_iterator, make_input_fn_iterator,
                                experimental_run, group, configure, ...
    StrategyExtended            TensorFlow's methods, and audit_variables
    ReplicaContext              with reduce_scatter and all_to_all
    get_strategy                same
    has_strategy                same
    experimental_set_strategy   for the thread that calls it
    get_replica_context         same
    in_cross_replica_context    same
    ValueContext                same
    RunOptions                  accepted; nothing is compiled
    MultiStepContext            in TensorFlow internal

Clusters

    cluster_resolver.SlurmClusterResolver
                                SlurmClusterResolver, in mpidist.cluster_resolver too:
                                addresses of the ranks that srun started; hosts in
                                Slurm's order; `strategy.cluster_resolver` under srun

Values and variables

    DistributedValues           `values` holds one component, of this process's replica
    PerReplica                  cannot be used as one array
    Mirrored                    works as an array
    tf.Variable                 Variable: no gradients; works as an array; no members of
                                graphs (handle, op, graph, eval, load, count_up_to);
                                `initial_value` is an error, as in eager execution
    tf.VariableAggregation      VariableAggregation
    tf.VariableSynchronization  VariableSynchronization
    tf.IndexedSlices            IndexedSlices: for the `scatter_...` methods, and to be
                                reduced

Communication

    ReduceOp                    or its name, `"sum"`, in any case; MIN, MAX, PRODUCT too
    Strategy.broadcast          not in TensorFlow, as `gather_objects` and `barrier`
    CrossDeviceOps              one object for each strategy
    HierarchicalCopyAllReduce   inside nodes first; arrays on GPUs by way of the host
    ReductionToOneDevice        the device may be a replica's number
    NcclAllReduce               refused where replicas share a GPU, or have none
    CommunicationOptions        only compression changes results
    CommunicationImplementation AUTO, MPI and NCCL; no RING (also called
                                CollectiveCommunication in TensorFlow)

Input

    tf.data.Dataset             Dataset: with from_hdf5; from_tensor_slices,
                                from_tensors, from_generator, range; map, batch,
                                shuffle (of all rows), repeat, take, skip, shard,
                                concatenate, zip, enumerate, unbatch, filter,
                                interleave, reduce, cache (in memory, once per node),
                                prefetch, with_options
    tf.data.Options             Options: only auto_shard_policy
    tf.data.experimental.AutoShardPolicy
                                AutoShardPolicy: OFF, AUTO, FILE, DATA; no HINT
    tf.data.INFINITE_CARDINALITY, tf.data.UNKNOWN_CARDINALITY
                                INFINITE_CARDINALITY, UNKNOWN_CARDINALITY: same numbers
    DistributedDataset          iterating is collective
    as_arrays                   not in TensorFlow: this replica's rows of each batch, as
                                arrays
    DistributedIterator         `next` is collective; get_state and set_state are new
    tf.data.Iterator            DatasetIterator: with get_state and set_state
    InputIterator               what make_dataset_iterator and make_input_fn_iterator
                                return; in TensorFlow internal
    InputContext                one input pipeline per replica
    InputOptions                batches are read ahead in a thread
    InputReplicationMode        PER_WORKER, since every worker is one replica
    tf.TensorSpec               TensorSpec: in `element_spec`, with None for the rows
    tf.experimental.Optional    Optional: of get_next_as_optional, from_value and empty
    tf.errors.OutOfRangeError   OutOfRangeError: a StopIteration

Output

    Hdf5Writer                  not in TensorFlow: each rank appends rows to a file of
                                its own; an index joins them to one HDF5 dataset

Saving and resuming

    tf.train.Checkpoint         Checkpoint: one HDF5 file, or one and shards; also nests
                                of arrays, numbers and text, random generators, dataset
                                iterators, objects with get_state and set_state; a
                                missing object is an error, unless is_partial=True;
                                `restore` restores at once, never later
    tf.train.CheckpointManager  CheckpointManager: keep_every and is_background are new
    tf.train.latest_checkpoint  latest_checkpoint: reads the folder; no latest_filename
    PreemptionCheckpointHandler also at the end of Slurm's time limit; exits with 99
    TerminationConfig           termination_watcher_fn, exit_fn, grace_period, save_fn
    run_elastic                 not in TensorFlow: continues without dead ranks

Statistics

    tf.keras.metrics            mpidist.statistics: Moments, Histogram, Quantiles,
                                ConfusionMatrix; exact, on any number of ranks
    Strategy.statistics_of      not in TensorFlow: mean, variance, min and max of
                                the rows of all ranks

Looking at a job

    Strategy.statistics         not in TensorFlow: how a job spends its time
    Strategy.timeline           not in TensorFlow: a trace of each rank
    progress                    a progress bar, like tqdm's, on rank 0
    span                        tf.profiler.experimental.Trace: a named section

PyTorch (`import mpidist.torch`, which needs `pip install torch`)

    torch.nn.parallel.DistributedDataParallel
                                mpidist.torch.DistributedDataParallel: gradients are
                                weighted by the rows of each rank
    torch.nn.SyncBatchNorm      mpidist.torch.SyncBatchNorm, convert_sync_batchnorm
    torch.utils.data.Dataset    mpidist.torch.from_dataset: its elements as a Dataset
    as_tensors                  not in torch: batches of HDF5 rows as tensors

JAX (`import mpidist.jax`, before JAX computes; needs `pip install jax`)

    jax.value_and_grad, grad    mpidist.jax.value_and_grad, grad: the mean over the rows
                                of all replicas
    jax.lax.psum, all_gather    mpidist.jax.all_reduce, all_gather, broadcast: inside
                                jit, grad, vmap, scan and cond, and outside
    jax.jit                     mpidist.jax.jit: raises the errors of mpidist
    as_jax                      not in JAX: batches of HDF5 rows as JAX arrays

Commands

    mpidist is python -m mpidist

    mpidist run                 starts a job with the right mpirun, or srun
    mpidist config              the settings (MPIDIST_... variables) and their origin
    mpidist version             what is installed
    python -m mpidist plan      what each rank of a job will read; needs no MPI
    python -m mpidist doctor    checks the machine or allocation of a job
    python -m mpidist tune      finds the fastest transport for each size
    python -m mpidist report    how a job spent its time; needs no MPI
    python -m mpidist diff      the first collective that differed; needs no MPI

Absent

    MultiWorkerMirroredStrategy use MirroredStrategy: replicas are ranks, on any nodes
    OneDeviceStrategy           use MirroredStrategy on one rank
    TPUStrategy                 there is no MPI on TPUs
    ParameterServerStrategy, CentralStorageStrategy
                                every replica has its own copy of each variable
    coordinator.*, partitioners.*, rpc.*, Server
                                ranks have no roles: all run the same script
    cluster_resolver.*          except for Slurm's: MPI's launcher knows the cluster
    PreemptionWatcher           built into PreemptionCheckpointHandler
    CollectiveHints             use CommunicationOptions
    tf.function, get_loss_reduction, DistributedVarOp (internal)
                                there is no graph: functions run eagerly
    tf.GradientTape, tf.keras   bring your own gradients (by hand, JAX, PyTorch, ...)
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

from mpidist._version import __version__ as __version__
from mpidist.launch import commands

# Where the public names are: `__init__.pyi` says it to type checkers, too
_ORIGINS = {
    alias.name: node.module or ""
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
__all__ = sorted(name for name, module in _ORIGINS.items() if module != "mpidist")

# `python -m mpidist` imports this first, perhaps where there is no MPI
if not commands.is_command():
    from mpidist.launch import mpi_defaults  # noqa: F401 - before MPI is imported
    from mpidist.launch import slurm as cluster_resolver
    from mpidist.resilience import exit_handling, watchdog
    from mpidist.strategy import mirrored_strategy  # noqa: F401 - what all jobs need

    sys.modules["mpidist.cluster_resolver"] = cluster_resolver  # as TensorFlow has it
    exit_handling.abort_on_exception()
    exit_handling.leave_together()
    watchdog.start_watch()


def __getattr__(name: str) -> Any:
    module = _ORIGINS.get(name)
    if module is None:
        from mpidist.util import near_misses

        near_misses.refuse(sys.modules[__name__], name, "module")
    if module == "mpidist":
        return importlib.import_module(f"mpidist.{name}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    if _is_asked_by_help():
        # With its classes `help(mpidist)` would have 7,000 lines more, most of them of
        # inherited methods; `help(mpidist.Dataset)` describes one
        return []
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*__all__, "cluster_resolver", "errors", "statistics", *special})


def _is_asked_by_help() -> bool:
    """Return whether pydoc is listing the names of this module."""
    frame = sys._getframe().f_back  # of __dir__
    for _ in range(3):  # inspect.getmembers is in between
        frame = frame and frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == "pydoc":
            return True
    return False
