"""Arrays of any library, and GPUs: binding, memory, streams, copies, kernels."""
