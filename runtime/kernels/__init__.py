"""Compiled arithmetic: small-batch matmuls, experts, arg-max, top-k, a thread pool and raw memory.

Imports `data` and `runtime/config` only.
"""
