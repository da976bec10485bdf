"""The default drafter: back-off interpolation over the evidence of all sources, and a tree of the best paths.

Imports what `runtime/drafters` may import. A compiled source is a ``Source``: a file with three functions, and a row of
the table in `drafter.py`.
"""
