"""Integrations of hdtool: in `generate` of transformers, in vLLM and SGLang, and in hdtool's own server.

Any module of `runtime` may be imported here.
"""
