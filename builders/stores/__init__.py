"""Builds and edits stores; build engines run the builds locally or on a Ray cluster.

Imports `data`, `runtime/stores` and `runtime/kernels`.
"""
