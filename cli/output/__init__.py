"""How commands show what they computed: answers, tables and reports.

Imports `data`, `runtime` and `cli/parameters`.
"""
