"""hdtool inside other programs: `generate` of transformers, vLLM and SGLang, and hdtool's own server.

Any module of `runtime` may be imported here.
"""
