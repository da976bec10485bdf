"""Checks of a model: draft trees, long contexts, and changes between prompts.

Imports `runtime/kernels`, the attention masks and the KV cache of `runtime/model`, and draft trees.
"""
