"""Published methods, implemented from their papers for comparison with `hd` in the same decoding loop.

Imports what `runtime/drafters` may import, but no other drafters.
"""
