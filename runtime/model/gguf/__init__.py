"""Models in GGUF files: which file is meant, its conversion, once, and weights that stay in the blocks of the file.

Imports `data`, `runtime/kernels` and `runtime/config`; transformers reads the files, and its class names stay in
`convert` and `packed_model`.
"""
