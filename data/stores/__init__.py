"""Stores on disk: manifests, files and default folders.

Imports `data/errors` and the other files of `data`.
"""
