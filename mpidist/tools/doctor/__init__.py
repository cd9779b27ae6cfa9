"""`python -m mpidist doctor`: what is wrong with the place where a job is to run."""
