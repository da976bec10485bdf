"""Recurrent layers and short convolutions in passes over draft trees.

Each row starts from the state after its parent. Mixers are found by watching a pass; they compute all rows in closed
form, or level by level with the library's code.
"""
