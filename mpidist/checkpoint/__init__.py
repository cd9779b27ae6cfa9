"""Saving the state of a job, and going on from it."""
