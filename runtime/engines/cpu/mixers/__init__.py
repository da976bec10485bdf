"""Token mixers other than attention: recurrences and short convolutions over the rows of a tree.

Each row starts from the state after its parent. What rows wrote is kept, and the accepted path is replayed.
"""
