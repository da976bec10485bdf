"""Trained drafting heads: Amphista (Li et al., 2024), its special case Medusa, Hydra, and a layer for multi-token
prediction (MTP)."""
