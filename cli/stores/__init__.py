"""The commands that build, change, show and list stores.

Imports `data`, `builders`, `runtime` and `cli`, and nothing heavy before a command runs.
"""
