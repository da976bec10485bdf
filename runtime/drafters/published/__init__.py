"""Methods that others published, written from their papers to be measured beside `hd` in the same loop.

Imports `data` and the loop.
"""
