"""What ``hdtool setup`` does with logs: it holds a part out, builds stores from the rest, and measures both.

Imports `data`, `runtime` and `builders/stores`.
"""
