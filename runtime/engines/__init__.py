"""Engines beside that of `runtime/model`: what computes forward passes over draft trees in another way.

Imports `data`, `runtime/config`, `runtime/kernels`, `runtime/model` and the draft tree.
"""
