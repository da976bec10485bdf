"""Decoder layers of the Llama kind in compiled code: their recognition, proof at loading, and use in a pass.

Imports `data`, `runtime/config`, `runtime/kernels` and `runtime/model`. A model keeps the layers of transformers where
a layer differs in structure or in its numbers, and computes with them whatever the compiled code does not take.
"""
