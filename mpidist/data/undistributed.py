"""A warning about datasets that each rank of a job goes through as a whole."""

from __future__ import annotations

import sys
from types import FrameType

from mpidist.notices import warn

__all__ = ["warn_undistributed"]

# Functions that these call may iterate over datasets: a generator's function, or the
# one given to distribute_datasets_from_function, or to Strategy.run
_CALLERS = ("mpidist.data.", "mpidist.extended")

_has_warned = False


def warn_undistributed() -> None:
    """Warn once in a job that all ranks read all rows; to be called by `__iter__`.

    Rank 1 does: what rank 0 does alone, such as an evaluation, is done on purpose.
    """
    global _has_warned
    MPI = sys.modules.get("mpi4py.MPI")  # noqa: N806  # commands run without MPI, too
    if _has_warned or MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    if MPI.COMM_WORLD.Get_rank() != 1 or _is_called_by_library(sys._getframe(2)):
        return
    _has_warned = True
    warn(
        "a dataset is iterated over without being distributed: each of the "
        f"{MPI.COMM_WORLD.Get_size()} ranks of this job reads all of its rows, in "
        "another order after a shuffle without a seed. Divide it by "
        "strategy.experimental_distribute_dataset(dataset); if each rank is to read "
        "everything, say so by dataset.with_options(mpidist.Options("
        "mpidist.AutoShardPolicy.OFF)). (Rank 1 says this, once)",
        stacklevel=3,
    )


def _is_called_by_library(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_CALLERS):
            return True
        frame = frame.f_back
    return False
