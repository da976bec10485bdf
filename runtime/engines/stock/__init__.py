"""Runs passes with transformers' own code, and recurrent layers and short convolutions over draft trees.

Each row of a recurrent layer starts from the state after its parent. Described mixers compute all rows by operations of
`reference`; others are found by observing a pass, and run level by level with the code of transformers.
"""
