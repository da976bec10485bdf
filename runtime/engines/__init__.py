"""Backends that compute a model's passes: compiled code (`cpu`), captured steps (`captured`) and stock code (`stock`).

`backend` has their interface, and an engine that runs each pass by the first backend that accepts it;
`captured_functions` defines how passes are captured on a device. These two import only `data`, `runtime/caches`,
`runtime/core` and `runtime/model`.
"""
