"""The CUDA engine: passes of Llama-like models over trees in a few kernels, for captured steps.

The library's own code reads prompts. ``fuse`` builds the pass; whoever captures it compares its logits.
"""
