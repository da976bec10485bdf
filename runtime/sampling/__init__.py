"""Chooses the next token from logits, by argmax or by a random draw.

Imports `data`, kernels, settings and draft trees.
"""
