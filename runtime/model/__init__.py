"""The target model: loading, the KV cache, attention masks, verification of trees, quantization and tensor parallelism.

Imports `data`, `runtime/kernels`, `runtime/config` and the draft tree; no drafter and nothing of evaluation.
"""
