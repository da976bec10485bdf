"""The decoding loop (``loop.py``), draft trees, acceptance, sampling and batching, and the subpackages that they use.

Imports only ``data`` from the rest of hdtool. The loop yields decoding steps, which callers turn into text and
statistics.
"""
