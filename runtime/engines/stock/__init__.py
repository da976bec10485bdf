"""Runs passes with transformers' own code, and recurrent layers and short convolutions over draft trees.

Each row of a recurrent layer starts from the state after its parent. Mixers, the modules that update states, are found
by observing a pass. They compute all rows in closed form, or level by level with the code of transformers.
"""
