"""Sweep over all model types that generate text, which tests hdtool on tiny random models.

``python -m tests.sweep [TYPE ...]`` checks types and prints a line for each; ``--page`` writes the table of the docs.
A type without a special rule is built by the general rules, so that the sweep covers new releases of transformers.
"""
