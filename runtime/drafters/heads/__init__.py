"""Trained drafting heads: Amphista (Li et al., 2024), and Medusa (Cai et al., 2024) as its special case."""
