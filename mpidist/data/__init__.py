"""Input: lazy datasets, the HDF5 reader, and their division over replicas."""
