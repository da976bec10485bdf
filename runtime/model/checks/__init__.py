"""Checks that a model verifies draft trees and long contexts correctly, and detects changes between prompts.

May import `runtime/kernels`, the attention masks and the KV cache of `runtime/model`, and draft trees.
"""
