"""Generation settings, grammars, stop strings, and text streams that turn tokens into text.

Imports only `data`, `runtime/settings`, `runtime/core` and `runtime/kernels`.
"""
