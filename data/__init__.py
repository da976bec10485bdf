"""Input and shipped data: readers of prompts and records, chat templates, file formats, errors and the demo.

Imports nothing else of hdtool, and heavy libraries only inside functions.
"""
