"""Trains drafting heads on a frozen target model.

Imports `data` and `runtime`.
"""
