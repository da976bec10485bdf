"""Offline work: building stores, training drafting heads, and collecting answers.

Imports `data` and `runtime`, never the command line.
"""
