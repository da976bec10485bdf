"""The default drafter: back-off interpolation over the evidence of all sources, and a tree of the best paths.

Imports what `runtime/drafters` may import, and its own `sources/`.
"""
