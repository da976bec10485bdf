"""The decoding loop (``loop.py``), draft trees, acceptance, sampling and batching, and the folders they use.

Imports ``data`` alone. Text, colors and statistics are made by the code that consumes the steps.
"""
