"""The embedded demo: a small language model and held-out prompts of several kinds, shipped with hdtool."""

from pathlib import Path

_HERE = Path(__file__).parent

NAME = "hdtool-demo"

MODEL = _HERE / "model"
"""A checkpoint as ``save_pretrained`` lays it out; ``docs/demo-model.md`` says how it was made."""

PROMPTS = _HERE / "prompts.jsonl"
"""Conversations to answer: ``id``, ``category``, ``messages``, and the ``reference`` that was held out."""
