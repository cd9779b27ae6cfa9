"""Reading and writing the rows of HDF5 files. Nothing here communicates."""
