"""Stores on disk: manifests, files and default folders.

Imports only ``data/errors`` and other files of ``data``.
"""
