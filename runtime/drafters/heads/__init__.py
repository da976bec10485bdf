"""Trained drafting heads: Amphista (Li et al., 2024), Medusa (a special case of it), Hydra, and a layer for multi-token
prediction (MTP).

Imports what `runtime/drafters` may import, and of other drafters only `trained`.
"""
