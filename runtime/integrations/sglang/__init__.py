"""Runs hdtool's drafter inside SGLang, in place of the corpus of SGLang's n-gram worker.

SGLang loads ``plugin`` in each of its processes; only ``algorithm`` and ``worker`` import SGLang.
"""
