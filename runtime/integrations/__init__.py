"""hdtool inside other programs: `generate` of transformers, and vLLM.

Imports all of `runtime` but `evaluation`.
"""
