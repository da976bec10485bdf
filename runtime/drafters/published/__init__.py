"""Published methods, implemented from their papers for comparison with `hd` in the same decoding loop.

Imports `data` and the decoding loop.
"""
