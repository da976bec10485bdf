"""Trains drafting heads on a frozen target model.

Imports ``data``, ``runtime`` and ``builders/evaluation``.
"""
