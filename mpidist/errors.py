"""Every exception that mpidist raises on purpose.

::

    MpidistError
    ├── LaunchError (RuntimeError)       launcher and MPI disagree about the job
    ├── ContextError (RuntimeError)      a call that the current context forbids
    ├── ArgumentError (ValueError)       an argument has an invalid value
    ├── ArgumentTypeError (TypeError)    an argument has an invalid type
    │   └── DTypeError                   an array has an unsupported dtype
    ├── MismatchError (ValueError)       replicas passed different arguments
    ├── CollectiveError (RuntimeError)   a collective failed
    │   ├── DivergenceError              replicas called different collectives
    │   ├── DeadlineError (TimeoutError) a replica did not arrive in time
    │   ├── RankLostError                ranks have died; see `run_elastic`
    │   └── RemoteError                  another replica failed
    ├── UnsupportedError (NotImplementedError)  not supported, as in tf.distribute
    ├── DataError                        data are missing, damaged or not writable
    │   └── CheckpointError              the same for a checkpoint, or it does not fit
    └── OutOfRangeError (StopIteration)  an iterator has no more batches

Errors in the arguments of a collective, and errors inside `Strategy.run`, are raised on
every replica before any data move. On the other replicas, `origin_rank` of the error is
the rank of the replica that failed.

If a function passed to `Strategy.run`, `ReplicaContext.merge_call` or `Dataset.map`
fails, or an error of mpidist ends the program, the traceback shows the program's own
lines and the call of mpidist. To see all lines, set MPIDIST_FULL_TRACEBACKS=1.
"""

from __future__ import annotations


class MpidistError(Exception):
    """Base of all exceptions of mpidist.

    Example:
      >>> try:
      ...     strategy.reduce("SUM", "text")
      ... except mpidist.MpidistError as error:
      ...     print(type(error).__name__, isinstance(error, TypeError))
      ArgumentTypeError True
    """


class LaunchError(MpidistError, RuntimeError):
    """The launcher and MPI disagree about the job, or a device cannot be bound.

    Example:
      >>> mpidist.MirroredStrategy(["GPU:99"])
      Traceback (most recent call last):
      mpidist.errors.LaunchError: GPU:99 cannot be used: ...
    """


class ContextError(MpidistError, RuntimeError):
    """A call was made from a replica or cross-replica context that forbids it.

    Example:
      >>> strategy.run(lambda: strategy.reduce("SUM", 1.0))
      Traceback (most recent call last):
      mpidist.errors.ContextError: reduce was called in replica context, ...
    """


class ArgumentError(MpidistError, ValueError):
    """An argument has an invalid value.

    Example:
      >>> mpidist.Dataset.range(8).batch(0)
      Traceback (most recent call last):
      mpidist.errors.ArgumentError: batch_size must be >= 1, not 0
    """


class ArgumentTypeError(MpidistError, TypeError):
    """An argument has an invalid type.

    Example:
      >>> strategy.reduce("SUM", "text")
      Traceback (most recent call last):
      mpidist.errors.ArgumentTypeError: value must be an array or a number, ...
    """


class DTypeError(ArgumentTypeError):
    """An array has a dtype that the operation does not support.

    Example:
      >>> strategy.reduce("SUM", np.array([True]))
      Traceback (most recent call last):
      mpidist.errors.DTypeError: value has dtype bool, which cannot be summed ...
    """


class MismatchError(MpidistError, ValueError):
    """Replicas called one collective with shapes, dtypes or options that differ.

    Example:
      >>> def step():
      ...     context = mpidist.get_replica_context()
      ...     rows = np.ones(3 + context.replica_id_in_sync_group)
      ...     return context.all_reduce("SUM", rows)
      >>> strategy.run(step)
      Traceback (most recent call last):
      mpidist.errors.MismatchError: all_reduce: the replicas' arguments differ: ...
    """


class CollectiveError(MpidistError, RuntimeError):
    """A collective failed.

    Example:
      >>> issubclass(mpidist.DivergenceError, mpidist.CollectiveError)
      True
    """


class DivergenceError(CollectiveError):
    """Replicas called different collectives at the same point of the program.

    Example:
      >>> def step():
      ...     context = mpidist.get_replica_context()
      ...     if context.replica_id_in_sync_group == 0:
      ...         return context.all_reduce("SUM", np.ones(2))
      ...     return context.all_gather(np.ones(2), axis=0)
      >>> strategy.run(step)
      Traceback (most recent call last):
      mpidist.errors.DivergenceError: the replicas called different collectives ...
    """


class DeadlineError(CollectiveError, TimeoutError):
    """A replica did not arrive within `CommunicationOptions.timeout_seconds`.

    Example:
      >>> options = mpidist.CommunicationOptions(timeout_seconds=60)
      >>> def step():
      ...     context = mpidist.get_replica_context()
      ...     try:
      ...         return context.all_reduce("SUM", np.ones(2), options)
      ...     except mpidist.DeadlineError:  # a replica took more than a minute
      ...         raise SystemExit(1)
      >>> strategy.run(step).values  # on replica 0
      (array([2., 2.]),)
    """


class RankLostError(CollectiveError):
    """Ranks have died and MPI continues without them; `run_elastic` can continue too.

    Attributes:
      ranks: their numbers in the strategy's communicator.

    Example:
      >>> try:
      ...     total = strategy.reduce("SUM", 1.0)
      ... except mpidist.RankLostError as error:
      ...     print(f"without ranks {error.ranks}")
      >>> total
      2.0
    """

    ranks: tuple[int, ...] = ()


class RemoteError(CollectiveError):
    """Another replica failed, with the error that the message quotes.

    Example:
      >>> def step():
      ...     class LocalError(Exception):
      ...         "Cannot be made on other replicas."
      ...     if mpidist.get_replica_context().replica_id_in_sync_group == 1:
      ...         raise LocalError("no more coal")
      >>> try:
      ...     strategy.run(step)
      ... except Exception as error:  # on replica 0
      ...     print(error, error.origin_rank)
      step.<locals>.LocalError: no more coal 1
    """


class UnsupportedError(MpidistError, NotImplementedError):
    """The object does not support the operation, as in tf.distribute.

    Example:
      >>> mpidist.Dataset.range(8).cache("file")
      Traceback (most recent call last):
      mpidist.errors.UnsupportedError: cache keeps elements in memory, not in ...
    """


class DataError(MpidistError):
    """Data are missing, inconsistent, damaged, changed while read, or not writable.

    Example:
      >>> len(mpidist.Dataset.from_hdf5("missing.h5", ["x"]))
      Traceback (most recent call last):
      mpidist.errors.DataError: ...missing.h5: cannot be opened as HDF5: ...
    """


class CheckpointError(DataError):
    """A checkpoint is missing, damaged, not writable, or does not match the objects.

    Example:
      >>> checkpoint = mpidist.Checkpoint(strategy=strategy, step=1)
      >>> try:
      ...     checkpoint.restore("missing")
      ... except mpidist.CheckpointError as error:
      ...     print(error)
      /.../missing.h5: there is no such file
    """


class OutOfRangeError(MpidistError, StopIteration):
    """An iterator was asked for a batch after its last one.

    Example:
      >>> rows = mpidist.Dataset.range(2).batch(2)
      >>> iterator = iter(strategy.experimental_distribute_dataset(rows))
      >>> batch = iterator.get_next()
      >>> iterator.get_next()
      Traceback (most recent call last):
      mpidist.errors.OutOfRangeError: the dataset has ended after 1 steps
    """
