"""How many draft tokens pay: measured forward passes, the cost curve, and the budget of nodes chosen by it.

Imports `data`, `runtime/config` and `runtime/model`.
"""
