"""Drafters: one file for each method, `hierarchy/` for the default one and `heads/` for trained drafting heads.

Imports `data` and of `runtime` all but `evaluation` and `integrations`.
"""
