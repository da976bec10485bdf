"""Caches of engines: each slot keeps the KV cache, recurrent states and tokens of a sequence after its answer ends.

Imports only `data`, `runtime/core` and `runtime/kernels`.
"""
