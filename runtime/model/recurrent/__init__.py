"""Recurrent layers and short convolutions in passes over draft trees: each row starts from the state after its parent.

Mixers are found by watching a pass. They compute all rows in closed form, or level by level by the library's own code.
"""
