"""Integrations of hdtool into transformers' ``generate``, vLLM, SGLang and ``llm``, and hdtool's own server.

Any module of ``runtime`` may be imported here.
"""
