"""Products of packed weights with inputs in 8 bits: integers are multiplied, and each part of a sum is scaled.

Imports `runtime/kernels/packed` and code of `runtime/kernels` that generates vector instructions.
"""
