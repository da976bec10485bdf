"""hdtool inside other programs: `generate` of transformers, and vLLM.

Imports everything of `runtime` but `evaluation`.
"""
