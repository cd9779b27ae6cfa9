"""What is done on GPUs: which one a rank has, its memory, kernels, MPI's support."""
