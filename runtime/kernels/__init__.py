"""Compiled arithmetic: products of small batches, arg-max, top-k, memory of outputs, raw memory and a clock.

Imports `data` and `runtime/config` only.
"""
