"""Offline tools that build stores, train drafting heads, set hdtool up from logs, and collect and evaluate answers.

Imports ``data`` and ``runtime``, never the command line.
"""
