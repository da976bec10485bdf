"""Trained drafting heads: Amphista's, and Medusa's as the plain case of them."""
