"""Conversations from rows of any known form, one family of forms per file, and the reader of inputs that uses them.

Imports `data/formats` and the errors. Every command that reads conversations goes through ``interpret``.
"""
