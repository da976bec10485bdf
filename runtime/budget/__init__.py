"""Adaptive draft size: measure a cost curve of forward passes, and use it to choose how many draft nodes to verify.

Imports only `data`, `runtime/settings`, `runtime/core`, `runtime/engines`, `runtime/kernels`, `runtime/model` and
`runtime/target`.
"""
