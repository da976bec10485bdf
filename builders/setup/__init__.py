"""Implements ``hdtool setup``: holds out part of the logs, builds stores from the rest, and measures both.

Imports `data`, `runtime`, `builders/stores` and `builders/evaluation`.
"""
