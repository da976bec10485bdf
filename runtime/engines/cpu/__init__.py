"""CPU engine: computes passes of supported model families in compiled code, from token ids to logits.

Transformers' code computes unsupported models and passes, and models whose weights or modules have changed.

The entry points are `compile_cpu` and `KeptProof`; code outside this package imports nothing else from it. This package
imports only `data`, `runtime/config`, `runtime/engine`, `runtime/kernels`, `runtime/model`, the draft tree and the
walks of `runtime/core`.
"""
