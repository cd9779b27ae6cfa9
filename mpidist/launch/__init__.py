"""Before MPI starts: launchers, Slurm, MPI defaults, early GPU binding."""
