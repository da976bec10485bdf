"""The embedded demo: how its text, tokenizer, model, prompts and stores were made.

Imports `data`, `runtime` and the other builders.
"""
