"""Readers and writers of files: prompts, conversations, records, stores, results, and the demo's data.

Imports nothing else of hdtool, and heavy libraries only inside functions.
"""
