"""The CPU engine: passes of known families of models in compiled code, from token ids to logits.

Imports `data`, `runtime/config`, `runtime/kernels`, `runtime/model`, the draft tree and sampling's walks. Its entries
are `compile_cpu` and `KeptProof`; nothing outside imports anything else of it. Other models, other passes and changed
models are computed by the library's code.
"""
