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
    """Base of all exceptions of mpidist."""


class LaunchError(MpidistError, RuntimeError):
    """The launcher and MPI disagree about the job, or a device cannot be bound."""


class ContextError(MpidistError, RuntimeError):
    """A call was made from a replica or cross-replica context that forbids it."""


class ArgumentError(MpidistError, ValueError):
    """An argument has a value that cannot be used."""


class ArgumentTypeError(MpidistError, TypeError):
    """An argument has a type that cannot be used."""


class DTypeError(ArgumentTypeError):
    """An array has a dtype that the operation is not defined for."""


class MismatchError(MpidistError, ValueError):
    """Replicas called one collective with shapes, dtypes or options that differ."""


class CollectiveError(MpidistError, RuntimeError):
    """A collective could not be carried out."""


class DivergenceError(CollectiveError):
    """Replicas called different collectives at the same point of the program."""


class DeadlineError(CollectiveError, TimeoutError):
    """A replica did not arrive within `CommunicationOptions.timeout_seconds`."""


class RankLostError(CollectiveError):
    """Ranks have died, and MPI goes on without them; `run_elastic` can, too.

    Attributes:
      ranks: their numbers in the strategy's communicator.
    """

    ranks: tuple[int, ...] = ()


class RemoteError(CollectiveError):
    """Another replica failed, with the error that the message quotes."""


class UnsupportedError(MpidistError, NotImplementedError):
    """An operation that has no meaning for the object, as in tf.distribute."""


class DataError(MpidistError):
    """Data are missing, unlike, damaged or changed while read, or cannot be written."""


class CheckpointError(DataError):
    """A checkpoint is missing, damaged or unwritable, or does not fit the objects."""


class OutOfRangeError(MpidistError, StopIteration):
    """An iterator was asked for a batch after its last one."""
