"""The CPU engine: passes of known model families in compiled code, from token ids to logits.

Imports `data`, `runtime/config`, `runtime/kernels`, `runtime/model`, the draft tree and sampling's walks. Its entry
points are `compile_cpu` and `KeptProof`; nothing outside imports anything else. Other models, other passes and changed
models use the library's code.
"""
