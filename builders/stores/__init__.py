"""Builds and edits stores; build executors run the builds locally or on a Ray cluster.

Imports only ``data``, ``runtime/settings``, ``runtime/kernels``, ``runtime/stores`` and ``runtime/target``.
"""
