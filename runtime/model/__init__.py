"""The target model: loading, KV cache, attention masks, tree verification, quantization and tensor parallelism.

Imports `data`, `runtime/kernels`, `runtime/config` and the draft tree; no drafter and nothing of evaluation.
"""
