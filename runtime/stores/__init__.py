"""Stores opened for reading: the model store, the corpus index, and the set of both that drafters use.

Imports `data`, `runtime/kernels` and `runtime/config`.
"""
