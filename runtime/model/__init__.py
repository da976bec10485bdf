"""What hdtool knows about stock models: refusals by family, masks, devices, quantization and changes of weights.

`transformers_internals` collects uses of undocumented interfaces. Imports only `data`, `runtime/caches`, `runtime/core`
and `runtime/kernels`.
"""
