"""Alternative engines for forward passes over draft trees.

Imports `data`, `runtime/config`, `runtime/kernels`, `runtime/model` and the draft tree.
"""
