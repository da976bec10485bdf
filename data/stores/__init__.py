"""Stores on disk: manifest, files, documents and default folders.

Imports `data/files`, `data/errors` and `data/unicode` only.
"""
