"""The CUDA engine: a pass of a model of the Llama kind in few kernels, for captured steps of one or several trees.

The library's own code reads prompts. ``fuse`` builds the pass, and whoever captures it compares its logits.
"""
