"""Implements ``hdtool setup``: holds out part of the logs, builds stores from the rest, and measures their effect.

Imports ``data``, ``runtime``, ``builders/stores`` and ``builders/evaluation``.
"""
