"""CUDA engine: computes a Llama-like model's pass over draft trees in a few kernels, for capture in a CUDA graph.

``fuse`` builds the pass. The code that captures the pass must compare the pass's logits with those of Transformers'
code, which still computes the prefill.
"""
