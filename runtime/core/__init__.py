"""The decoding loop and its contracts: draft trees, acceptance, sampling, and drafter, engine and cache interfaces.

Nothing here imports a model or an engine.
"""
