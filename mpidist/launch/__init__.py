"""What must be known and set before MPI starts: launchers, Slurm, the early GPU."""
