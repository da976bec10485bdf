"""``hdtool chat``: a conversation in the terminal.

Imports `data`, `runtime` and the rest of `cli`; torch, transformers and the line editor only once the command runs.
"""
