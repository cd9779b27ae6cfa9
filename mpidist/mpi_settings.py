"""Settings of MPI libraries that must stand before MPI is initialised.

Importing this makes them, in the environment; what stands there already is kept. Where
the program has imported mpi4py before, they come too late, and do no harm.
"""

from __future__ import annotations

import os

from mpidist import launch_check
from mpidist.gpu import early

__all__: list[str] = []

# Open MPI writes to stderr that a way to make windows cannot be used, and takes another
os.environ.setdefault("OMPI_MCA_osc_ucx_verbose", "-1")

# Where ranks have died, Open MPI sometimes waits for them at its end. (Programs end
# together without: see `launch.leave_together`.)
if os.environ.get("OMPI_MCA_mpi_ft_enable"):  # noqa: SIM112 - its own spelling
    os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")

# What srun offered mpirun's daemons is not for the ranks: MPICH ends if it finds both
if "MPI_LOCALNRANKS" in os.environ:
    os.environ.pop("PMIX_NAMESPACE", None)

# Some choose their GPU when they start
early.choose_early(os.environ)

# Last, since it may start MPI
launch_check.start_below_pmix(os.environ)
