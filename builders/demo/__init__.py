"""The stores of ``hdtool demo``'s real model, and the demo's comparison of plain decoding with drafting.

Imports ``data``, ``runtime``, ``builders/stores`` and ``builders/evaluation``.
"""
