"""Interprets described models in plain torch operations: the specification of what faster engines compute.

`captured` captures the same pass, and `cuda` replaces its operations by Triton kernels.
"""
