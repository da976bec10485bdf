"""Compiled arithmetic of decoder layers: norms, rotary positions, attention, gated units, and whole layers.

Imports `data`, `runtime/config` and `runtime/kernels` only. Each row of numbers is computed by itself, in an order of
operations that its own numbers determine, so that a result does not depend on other rows.
"""
