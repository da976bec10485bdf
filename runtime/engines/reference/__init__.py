"""Interprets described models in plain torch operations: the specification of what faster engines compute.

`cuda` captures the same pass and replaces its operations by Triton kernels.
"""
