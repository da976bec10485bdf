"""What answers must keep to and how they are shown: generation settings, grammars, stop strings and text streams.

Imports `data` and `runtime/config`, `core` and `kernels`, but no model, engine, drafter or store.
"""
