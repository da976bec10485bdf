"""Drafters: one file for each method, `hierarchy/` for the default one and `heads/` for trained drafting heads.

Imports `data` and all of `runtime` but `integrations`.
"""
