"""General tools: validation, nested structures, files, threads, buffers."""
