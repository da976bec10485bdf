"""CPU and CUDA engines that replace the forward passes of Transformers over draft trees.

This package imports only `data`, `runtime/config`, `runtime/kernels`, `runtime/model` and the draft tree.
"""
