"""Slots for sequences: each keeps its KV cache, recurrent states and tokens after the answer ends.

Imports only `data`, `runtime/core` and `runtime/kernels`.
"""
