"""Answers to prompts (``answerer.py``, ``dialogues.py``, ``streamed_answer.py``) and their samplers.

They are made with the subpackages, none of which but `integrations` imports a module from here.
Of the rest of hdtool, only ``data`` is imported.
"""
