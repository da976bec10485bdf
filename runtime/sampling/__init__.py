"""The choice of the next token from its logits.

Imports `data`, kernels, settings and the size of trees.
"""
