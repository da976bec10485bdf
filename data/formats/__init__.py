"""File formats of inputs, one per file: JSON, Parquet, SQLite, logs of servers, text, and what compresses them.

Imports `data/errors` only. A format yields rows; `data/conversations` interprets them.
"""
