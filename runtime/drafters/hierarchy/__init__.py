"""The default drafter: evidence of all sources is combined into one estimate, from which the tree is built.

Imports what `runtime/drafters` may import, and its own `sources/`.
"""
