"""The history: earlier answers in memory or in a store on disk, and the search of both for places to draft from.

Imports `data`, `runtime/stores` and `runtime/kernels`.
"""
