"""Tests of where weights are stored and how they are read: GGUF files, names of tensors, and the store."""
