"""Read and write rows of HDF5 files. Nothing here communicates."""
