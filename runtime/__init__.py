"""Answers to prompts (``answerer.py``, ``dialogues.py``, ``answer.py``) and their samplers, made with the subpackages,
none of which but `integrations` imports a module from here.

Of the rest of hdtool, only ``data`` is imported.
"""
