"""The decoding loop (``decode.py``), the draft tree, acceptance, sampling and batching, and the folders they use.

Imports ``data`` alone. Text, colours and statistics are made by the code that consumes the steps.
"""
