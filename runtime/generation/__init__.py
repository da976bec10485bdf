"""What answers must keep to and how they are shown: generation settings, grammars, stop strings and text streams.

Imports only `data`, `runtime/config`, `runtime/core` and `runtime/kernels`.
"""
