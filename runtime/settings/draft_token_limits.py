"""Limits on the number of draft tokens per forward pass, with and without measured pass times."""

LARGEST_BUDGET = 64
"""Maximum number of draft tokens per forward pass."""
FIXED_BUDGET = 32
"""Draft tokens per step when no pass times have been measured."""
