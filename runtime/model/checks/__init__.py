"""Checks of a model beside the one of a small tree: after a long context, and before each prompt for changes.

Imports `runtime/kernels`, the attention masks and the KV cache of `runtime/model`, and draft trees.
"""
