"""Trained drafters that read accepted tokens with the target's hidden states, and the draft models beside them."""
