"""CPU and CUDA engines that replace Transformers' forward passes over draft trees.

This package imports only `data`, `runtime/config`, `runtime/engine`, `runtime/kernels`, `runtime/model`, the draft tree
and, in `cpu`, the argmax walks of `runtime/core`.
"""
