"""The decoding loop (``loop.py``), draft trees, acceptance, sampling and batching, and the folders they use.

Imports nothing from hdtool but ``data``. The loop yields steps of tokens, which callers turn into text and statistics.
"""
