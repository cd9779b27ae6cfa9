"""What `python -m mpidist` runs."""
