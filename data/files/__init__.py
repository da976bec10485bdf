"""Writing files safely: atomic replacement, locks, resumable JSON lines, recognition of hdtool's own files.

Imports `data/errors` only.
"""
