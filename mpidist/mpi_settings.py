"""Settings of MPI libraries that must stand before MPI is initialised.

Importing this makes them, in the environment; what stands there already is kept. Where
the program has imported mpi4py before, they come too late, and do no harm.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys

from mpidist import launch_check
from mpidist.gpu import early
from mpidist.hang_limit import hang_seconds

__all__: list[str] = []

_START_SECONDS = 300.0

# Open MPI writes to stderr that a way to make windows cannot be used, and takes another
os.environ.setdefault("OMPI_MCA_osc_ucx_verbose", "-1")

if launch_check.is_elastic(os.environ):
    # Where ranks have died, Open MPI sometimes waits for them at its end. (Programs end
    # together without: see `launch.leave_together`.)
    os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")

# What srun offered mpirun's daemons is not for the ranks: MPICH ends if it finds both
if "MPI_LOCALNRANKS" in os.environ:
    os.environ.pop("PMIX_NAMESPACE", None)

# Some choose their GPU when they start
early.choose_early(os.environ)

# Last, since it may start MPI
launch_check.start_below_pmix(os.environ)

# Of a rank that dies before MPI has started nobody hears: the others would wait for it
if launch_check.is_elastic(os.environ) and "mpi4py.MPI" not in sys.modules:
    limit = min(hang_seconds(os.environ), _START_SECONDS)
    faulthandler.dump_traceback_later(limit, exit=True)
    importlib.import_module("mpi4py.MPI")
    faulthandler.cancel_dump_traceback_later()
