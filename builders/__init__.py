"""Offline tools that build stores, train drafting heads, collect and evaluate answers, and create the embedded demo.

Imports `data` and `runtime`, never the command line.
"""
