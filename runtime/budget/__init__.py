"""Adaptive draft size: measure a cost curve of forward passes, and use it to choose how many draft nodes to verify.

Imports `data`, `runtime/config`, `runtime/engines` and `runtime/target`.
"""
