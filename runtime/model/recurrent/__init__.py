"""Recurrent layers and short convolutions in passes over draft trees."""
