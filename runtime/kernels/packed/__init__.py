"""Weights in blocks, of GGUF files and of torchao: their formats, their expansion to float32, and the matrix that a
layer keeps.

Imports `data` and code of `runtime/kernels` that generates vector instructions; it depends on no model and no file.
"""
