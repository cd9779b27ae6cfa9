"""Input: lazy datasets, and their division over replicas."""
