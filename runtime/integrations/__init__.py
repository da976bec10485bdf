"""Integrations of hdtool into transformers' `generate`, vLLM and SGLang, and hdtool's own server.

Any module of `runtime` may be imported here.
"""
