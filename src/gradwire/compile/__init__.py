"""What compiles: machine code by Numba and its threads, launches of Triton kernels, CUDA graphs."""
