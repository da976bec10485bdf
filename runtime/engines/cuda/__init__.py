"""CUDA engine: captures passes over draft trees as CUDA graphs, and computes their operations by Triton kernels.

`fuse` builds hdtool's own pass of a described model. `CapturedPasses` captures it, or a pass through Transformers'
layers, and compares the logits with those of Transformers' code, which still computes the prefill.
"""
