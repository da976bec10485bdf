"""Readers and writers of files: prompts, conversations, records, stores, results, and the demo's data.

Imports no other package of hdtool, and imports heavy libraries only inside functions.
"""
