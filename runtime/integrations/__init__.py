"""hdtool inside other programs: `generate` of transformers, vLLM and SGLang, and hdtool's own server.

Imports all of `runtime`.
"""
