"""The model store, the corpus index and the history, with the look-ups that drafters and ``inspect`` share.

Imports `data`, `runtime/kernels` and `runtime/config`.
"""
