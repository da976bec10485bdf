"""Compiled arithmetic: products of small batches, top-k, raw memory and a clock.

Imports `data` and `runtime/config` only.
"""
