"""Locates and converts GGUF models, and loads weights that stay in the file's quantized blocks.

May import `data`, `runtime/kernels` and `runtime/config`. Transformers reads the files; only `convert` and `packing`
use its classes.
"""
