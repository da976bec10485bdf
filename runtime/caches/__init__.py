"""KV caches and recurrent states, kept between answers: slots for sequences, for each kind of layer.

Imports only `data`, `runtime/core` and `runtime/kernels`.
"""
