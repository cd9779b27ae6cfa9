"""What a job will read, told without MPI: `python -m mpidist plan`."""
