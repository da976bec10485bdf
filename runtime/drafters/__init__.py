"""Drafters: the default one in `hierarchy/`, trained ones in `trained/` and `heads/`, and other published methods.

Imports `data` and all of `runtime` but `engines`, which a `Target` provides, and `integrations`.
"""
