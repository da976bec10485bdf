"""Offline work: building stores, training drafting heads, collecting answers, and making the embedded demo.

Imports `data` and `runtime`, never the command line.
"""
