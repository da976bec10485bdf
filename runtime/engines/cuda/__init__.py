"""CUDA: captures functions as CUDA graphs, and computes the operations of described passes by Triton kernels."""
