"""Save and restore the state of a job."""
