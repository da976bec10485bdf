"""The embedded demo: a small language model and held-out prompts of several kinds, shipped with hdtool."""

from pathlib import Path

_HERE = Path(__file__).parent

NAME = "hdtool-demo"

MODEL = _HERE / "model"
"""A checkpoint in the layout of ``save_pretrained``; ``docs/reference/demo-model.md`` says how it was made."""

PROMPTS = _HERE / "prompts.jsonl"
"""Conversations to answer: ``id``, ``category``, ``messages``, and the ``reference`` that was held out."""

MODEL_STORE = _HERE / "stores" / "model"
"""Frequent token sequences of the model's answers to questions of its training data."""

CORPUS_INDEX = _HERE / "stores" / "corpus"
"""Worked problems, documentation and code of the training data, nothing held out."""

HEADS = (_HERE / "heads" / "amphista", _HERE / "heads" / "medusa")
"""Drafting heads, trained on the model's own answers: see ``docs/guides/train-heads.md``."""
