"""The default drafter: back-off interpolation of the evidence from all sources, and a tree of the best paths.

Imports what `runtime/drafters` may import, and of other drafters only `trained`. To add a compiled source, define a
``CompiledSource`` with the functions ``find``, ``weigh`` and ``move`` in a file of its own, and list it in the table in
`hierarchy.py`.
"""
