"""Trained drafters: those that read the target's hidden states after accepted tokens, and separate draft models.

Imports what `runtime/drafters` may import, but no other drafters.
"""
