"""CPU and CUDA engines that replace Transformers' forward passes over draft trees.

This package imports only `data`, `runtime/config`, `runtime/kernels`, `runtime/model` and the draft tree.
"""
