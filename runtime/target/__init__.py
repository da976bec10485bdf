"""Loads a target model and its tokenizer from a folder, the hub or a GGUF file, in one process or in several.

Brings weights, engines and kept proofs together; no engine imports this package.
"""
