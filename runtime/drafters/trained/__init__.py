"""Trained drafters: those that read the target's hidden states after accepted tokens, and separate draft models."""
