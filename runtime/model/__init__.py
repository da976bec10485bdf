"""What hdtool knows about stock models: refusals by family, masks, placement, quantization and changes of weights.

`transformers_internals` collects uses of undocumented interfaces. May import `runtime/caches`, `runtime/core`,
`runtime/config` and `runtime/kernels`, but no engine.
"""
