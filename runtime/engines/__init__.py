"""Engines for models: `target` chooses between passes of compiled code (`cpu`), captured steps (`cuda`) and stock code.

May import `runtime/core`, `runtime/caches`, `runtime/kernels`, `runtime/model`, `runtime/program` and
`runtime/weights`.
"""
