"""Stores on disk: manifests, files and default folders.

Imports nothing of hdtool outside ``data``.
"""
