"""The model store, the corpus index and the history, with the compiled lookups that drafters and ``inspect`` use.

Imports only `data`, `runtime/settings`, `runtime/core` and `runtime/kernels`.
"""
