"""Trained drafting heads: Amphista, Medusa (a special case of it), Hydra, and multi-token-prediction (MTP) layers.

Imports what `runtime/drafters` may import, and of other drafters only `trained`.
"""
