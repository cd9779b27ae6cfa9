"""Every exception that mpidist raises on purpose.

::

    MpidistError
    ├── LaunchError (RuntimeError)       the launcher and MPI disagree about the job
    ├── ContextError (RuntimeError)      a call from a context that does not allow it
    ├── ArgumentError (ValueError)       an argument has a value that cannot be used
    ├── ArgumentTypeError (TypeError)    an argument has a type that cannot be used
    │   └── DTypeError                   ... or an array a dtype that cannot be reduced
    ├── MismatchError (ValueError)       replicas gave one collective unlike arguments
    ├── CollectiveError (RuntimeError)   a collective could not be carried out
    │   ├── DivergenceError              replicas called different collectives
    │   ├── DeadlineError (TimeoutError) a replica did not arrive in time
    │   ├── RankLostError                ranks have died; see `run_elastic`
    │   └── RemoteError                  another replica failed
    ├── UnsupportedError (NotImplementedError)  tf.distribute has it no more than we do
    ├── DataError                        data are missing, unlike, damaged or unwritable
    │   └── CheckpointError              ... or a checkpoint, or it does not fit
    └── OutOfRangeError (StopIteration)  an iterator was asked for more than there is

Errors in the arguments of a collective, and errors that happen inside
`Strategy.run`, are raised on every replica, before any data move. On a replica that
was not the one to fail, the error's `origin_rank` says which one was.

Tracebacks of errors in functions that `Strategy.run`, `ReplicaContext.merge_call` and
`Dataset.map` call show the program's own lines, and one of mpidist; the variable
MPIDIST_FULL_TRACEBACKS=1 shows all.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "CheckpointError",
    "CollectiveError",
    "ContextError",
    "DTypeError",
    "DataError",
    "DeadlineError",
    "DivergenceError",
    "LaunchError",
    "MismatchError",
    "MpidistError",
    "OutOfRangeError",
    "RankLostError",
    "RemoteError",
    "UnsupportedError",
]


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
    """An argument has a value that cannot be used.

    Example:
      >>> mpidist.Dataset.range(8).batch(0)
      Traceback (most recent call last):
      mpidist.errors.ArgumentError: batch_size must be >= 1, not 0
    """


class ArgumentTypeError(MpidistError, TypeError):
    """An argument has a type that cannot be used.

    Example:
      >>> strategy.reduce("SUM", "text")
      Traceback (most recent call last):
      mpidist.errors.ArgumentTypeError: value must be an array or a number, ...
    """


class DTypeError(ArgumentTypeError):
    """An array has a dtype that the operation is not defined for.

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
    """A collective could not be carried out.

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
    """Ranks have died, and MPI goes on without them; `run_elastic` can, too.

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
    """An operation that has no meaning for the object, as in tf.distribute.

    Example:
      >>> mpidist.Dataset.range(8).cache("file")
      Traceback (most recent call last):
      mpidist.errors.UnsupportedError: cache keeps elements in memory, not in ...
    """


class DataError(MpidistError):
    """Data are missing, unlike, damaged or changed while read, or cannot be written.

    Example:
      >>> len(mpidist.Dataset.from_hdf5("missing.h5", ["x"]))
      Traceback (most recent call last):
      mpidist.errors.DataError: ...missing.h5: cannot be opened as HDF5: ...
    """


class CheckpointError(DataError):
    """A checkpoint is missing, damaged or unwritable, or does not fit the objects.

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
