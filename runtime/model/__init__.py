"""The target model: loading, KV cache, attention masks, tree verification, quantization and tensor parallelism.

May import `data`, `runtime/kernels`, `runtime/config` and the draft tree, but no drafters and no evaluation code.
"""
