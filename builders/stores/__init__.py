"""Store builds: corpus index, model store, edits of stores, and the engines that run builds.

Imports `data`, `runtime/stores` and `runtime/kernels`.
"""
