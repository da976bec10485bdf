"""How many tokens are drafted for a forward pass: at most, and where no pass times have been measured."""

LARGEST_BUDGET = 64
"""Maximum number of draft tokens per forward pass."""
FIXED_BUDGET = 32
"""Draft tokens per step when no pass times have been measured."""
