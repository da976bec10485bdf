"""Token mixers other than attention: recurrences and short convolutions over draft trees.

Each row of a tree starts from the state after its parent. A pass keeps the inputs of each row's state update, so that
the accepted path can be replayed.
"""
