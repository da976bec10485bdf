"""Sources of the hierarchy: one file for each, with the evidence that it has for a node of a growing tree.

Imports `data`, `runtime/kernels` and `runtime/stores`.
"""
