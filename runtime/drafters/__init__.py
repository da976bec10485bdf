"""Drafters: the default one in `hierarchy/`, trained ones in `trained/` and `heads/`, and other published methods.

May import `data`, and all of `runtime` except `integrations` and `engines`, whose passes a `Target` provides.
"""
