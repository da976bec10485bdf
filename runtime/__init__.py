"""Answers prompts: requests and samplers (``answer_plan.py``), sessions (``answerer.py``, ``dialogues.py``), texts.

Of the subpackages, only `integrations` imports modules of this level. Of the rest of hdtool, ``runtime`` imports only
``data``.
"""
