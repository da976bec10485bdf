"""Builds of stores: the corpus index, the model store, stores made from stores, and the engines that carry out builds.

Imports `data`, `runtime/stores` and `runtime/kernels`.
"""
