"""Models in GGUF files: which file is meant, and its conversion, once, to the layout that transformers loads at once.

Imports `data` and `runtime/config`; transformers reads the files, and its class names stay in `convert`.
"""
