"""The default drafter: back-off interpolation of the evidence from all sources, and a tree of the best paths.

Imports what `runtime/drafters` may import. To add a compiled source, write a file with a ``CompiledSource`` of three
functions, and list it in the table in `drafter.py`.
"""
