"""GGUF models: locating and converting the file, and weights that stay in its blocks.

Imports `data`, `runtime/kernels` and `runtime/config`. Transformers reads the files; its class names stay in `convert`
and `packing`.
"""
