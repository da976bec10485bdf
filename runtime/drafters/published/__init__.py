"""Published methods, implemented from their papers so that they can be compared with `hd` in the same loop.

Imports `data` and the loop.
"""
