"""Builds and edits of stores, and the engines that run builds.

Imports `data`, `runtime/stores` and `runtime/kernels`.
"""
