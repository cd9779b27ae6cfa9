"""General tools without MPI: validation, nested structures, files, threads, buffers."""
