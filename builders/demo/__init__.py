"""What ``hdtool demo`` shows: stores for its real model, and answers by plain decoding and with drafts, side by side.

Imports `data`, `runtime` and the other builders.
"""
