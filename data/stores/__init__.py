"""What a store is on disk: its manifest, its files, its documents and its place.

Imports `data/files` and `data/errors` only.
"""
