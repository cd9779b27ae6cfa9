"""`python -m mpidist doctor`: checks the machine or allocation of a job."""
