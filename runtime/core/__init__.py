"""The decoding loop and its contracts: draft trees, acceptance, sampling, and the interfaces of drafter, engine, cache.

Nothing here imports a model or an engine.
"""
