"""Captured passes: steps with fixed tensor shapes, which a `Capture` of the device records once and then replays.

`fuse` builds hdtool's own pass of a described model. `CapturedPasses` captures it, or a pass through transformers'
layers, and compares the logits with those of transformers' code, which still computes the prefill. Nothing here needs
CUDA: on other devices, tests pass a `Capture` of their own.
"""
