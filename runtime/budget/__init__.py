"""Adaptive draft size: measured forward passes, the cost curve, and the budget of nodes chosen by it.

Imports `data`, `runtime/config` and `runtime/model`.
"""
