"""Backends that compute a model's passes: compiled code (`cpu`), captured steps (`cuda`) and stock code (`stock`).

`backend` has their interface, and an engine that runs each pass by the first that accepts it. Imports only
`runtime/caches`, `runtime/core` and `runtime/model`.
"""
