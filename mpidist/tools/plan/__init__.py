"""`python -m mpidist plan`: estimate what a job will read, without MPI."""
