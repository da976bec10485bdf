"""Builds and edits stores; build engines run the builds locally or on a Ray cluster.

Imports only `data`, `runtime/config`, `runtime/kernels`, `runtime/stores` and `runtime/target`.
"""
