"""CUDA engine: computes a Llama-like model's pass over draft trees in a few kernels, for capture in a CUDA graph.

``fuse`` builds the pass. The code that captures it must compare its logits with those of Transformers, whose own code
still computes the prefill.
"""
