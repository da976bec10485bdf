"""Adaptive draft size: time forward passes, keep their cost curve, and choose by it how many nodes to verify.

Imports `data`, `runtime/config` and `runtime/model`.
"""
