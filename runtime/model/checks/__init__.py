"""Checks that a model verifies draft trees correctly, even after long contexts, and detects changes to the model.

May import `runtime/kernels`, the attention masks and the KV cache of `runtime/model`, and draft trees.
"""
