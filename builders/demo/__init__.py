"""Scripts that make the embedded demo: its text, tokenizer, model, prompts and stores.

Imports `data`, `runtime` and the other builders.
"""
