"""Offline work: builds stores, trains drafting heads, collects answers, and makes the embedded demo.

Imports `data` and `runtime`, never the command line.
"""
