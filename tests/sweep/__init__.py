"""A sweep over every type of model that generates text: tiny random models, and what hdtool answers with them.

``python -m tests.sweep [TYPE ...]`` checks types and prints a line for each; ``--page`` writes the table of the docs.
A type that no rule knows is built by the general ones, so that a new release of the library is swept as it is.
"""
