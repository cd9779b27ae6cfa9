"""`python -m mpidist plan`: what a job will read, told without MPI."""
