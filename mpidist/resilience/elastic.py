"""Continuing without dead ranks, if MPI supports it (ULFM)."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

from mpi4py import MPI

from mpidist.comm.consensus.consensus import Consensus
from mpidist.comm.consensus.failures import FailureDetector, agree, can_survive
from mpidist.comm.consensus.signatures import name_ranks
from mpidist.errors import DeadlineError, RankLostError
from mpidist.launch.launchers import check_launch
from mpidist.resilience.watchdog import end_job
from mpidist.strategy.mirrored_strategy import MirroredStrategy
from mpidist.strategy.strategy import Strategy
from mpidist.util import logs, validation
from mpidist.util.settings import hang_seconds

T = TypeVar("T")


def run_elastic(
    train: Callable[[Any], T],
    make_strategy: Callable[..., Strategy] = MirroredStrategy,
    *,
    min_replicas: int = 1,
) -> T:
    """Return `train(strategy)`; if ranks die, call it again on the survivors.

    Collective over COMM_WORLD. It continues without dead ranks under Open MPI's
    `mpirun --with-ft ulfm` with MPI_THREAD_MULTIPLE: the current collective raises
    RankLostError on all survivors; they create a new strategy with fewer, renumbered
    replicas and call `train` with it. Otherwise the launcher ends the job when a rank
    dies, and `train` is called once. The line at the start of a job says which.

    `train` must create everything with the strategy that it gets: variables, datasets
    and checkpoints, and restore the latest checkpoint. The global batch size does not
    change. If some ranks have returned from `train` when a rank dies, all call it
    again. Any other exception, or sys.exit, ends the job as usual.

    Args:
      train: called with a strategy. It must not catch RankLostError.
      make_strategy: called with the keyword `communicator`.
      min_replicas: with fewer replicas, the job ends.

    Raises, on all ranks:
      ArgumentError: min_replicas < 1.
      ArgumentTypeError: an argument is not a function, or `min_replicas` not an
        integer.
      RankLostError: fewer than `min_replicas` ranks are left.
      What `train` raises.

    Example:
      >>> def train(strategy):
      ...     with strategy.scope():
      ...         w = mpidist.Variable(np.zeros(2))
      ...     manager = mpidist.CheckpointManager(mpidist.Checkpoint(w=w), "run", 2)
      ...     manager.restore_or_initialize()
      ...     return strategy.reduce("SUM", 1)
      >>> int(mpidist.run_elastic(train))
      2
    """
    validation.function("train", train)
    validation.function("make_strategy", make_strategy)
    min_replicas = validation.integer("min_replicas", min_replicas, 1)
    world = MPI.COMM_WORLD
    check_launch(os.environ, world.Get_size(), MPI.Get_library_version())
    if not can_survive() or world.Get_size() == 1:
        return train(make_strategy(communicator=world))
    survivors = _shrink(world)  # some may have died already
    while survivors.Get_size() >= min_replicas:
        results = _try_with(survivors, train, make_strategy)
        if results:
            return results[0]
        survivors = _shrink(survivors)
    raise RankLostError(
        f"{name_ranks(range(survivors.Get_size()))} are left, but min_replicas is "
        f"{min_replicas}"
    )


def _try_with(
    survivors: MPI.Intracomm,
    train: Callable[[Any], T],
    make_strategy: Callable[..., Strategy],
) -> list[T]:
    """Return the result of `train` if all survivors return. Collective over these.

    Else return an empty list, and free everything that `train` created.
    """
    failures = FailureDetector(survivors)
    results = []
    try:
        results = [train(make_strategy(communicator=survivors))]
    except Exception as error:
        if failures.check(error) is error:  # no rank has died
            raise
        _forget(error)
    is_done = _agree(survivors, bool(results))
    if is_done:
        FailureDetector.poll()
    else:
        failures.wait_for_names()
    _free_lost(failures)
    return results if is_done else []


def _forget(error: BaseException) -> None:
    """Clear the local variables of all frames of an error.

    They belong to a lost strategy and may be large.
    """
    found: BaseException | None = error
    while found is not None:
        traceback.clear_frames(found.__traceback__)
        found = found.__cause__ or found.__context__


def _agree(survivors: MPI.Intracomm, is_done: bool) -> bool:
    """Return whether all survivors have ended `train`. Collective over these."""
    try:
        return agree(survivors, is_done, hang_seconds(os.environ))
    except DeadlineError as error:
        rank = MPI.COMM_WORLD.Get_rank()
        end_job(f"mpidist: rank {rank} has left run_elastic's function, and {error}")
        raise


def _free_lost(failures: FailureDetector) -> None:
    """Free resources of strategies with dead ranks. Not collective."""
    lost = [one for one in FailureDetector.in_use if one.ranks or one is failures]
    for end in [end for one in lost for end in one.at_end]:
        end()
    for consensus in list(Consensus.in_use):
        if consensus.failures.ranks:
            consensus.close()
    for one in lost:
        one.close()


def _shrink(survivors: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the survivors, in the same order. Collective."""
    left = cast(MPI.Intracomm, survivors.Shrink())
    here = set(left.group.Translate_ranks(None, survivors.group))
    dead = [rank for rank in range(survivors.Get_size()) if rank not in here]
    if dead and left.Get_rank() == 0:
        logs.warning(
            "resilience",
            f"mpidist: {name_ranks(dead)} of {survivors.Get_size()} died; "
            f"{left.Get_size()} continue",
        )
    return left
