"""Checks that a model gives the same logits for draft trees or chains as token by token, even after long contexts.

May import `runtime/engines/stock`, but no faster engines, because those are compared with the stock one.
"""
