"""Drafting methods, their sources, and the options that have an effect on them."""

from __future__ import annotations

from typing import NamedTuple

from hdtool.runtime.config.setting import require
from hdtool.runtime.source_names import plugins

SOURCE_LETTERS = "CMS"
"""Context table, model store and corpus index."""
LOGIT_LETTERS = "LR"
"""Sources of the model's logits: last-token logits and recycled rankings."""
HISTORY_LETTER = "H"
SOURCE_NAMES = {
    "C": "context",
    "H": "history",
    "M": "model",
    "S": "corpus",
    "L": "last-logits",
    "R": "recycled",
}
"""Names of the sources in options, which take letters as well."""


ALL_LETTERS = "".join(SOURCE_NAMES)
STORE_LETTERS = SOURCE_LETTERS[0] + HISTORY_LETTER + SOURCE_LETTERS[1:]
"""Sources that draft from tokens alone."""


class Method(NamedTuple):
    """A drafting method."""

    description: str
    databases: str
    """Letters of its stores; C is the conversation, whatever finds matches in it."""
    logits: str = ""
    """Letters of its sources among the model's logits."""
    history: bool = False
    """Whether it drafts from earlier answers."""
    trained: str = ""
    """The kind of trained drafter that it needs."""


HEADS, MTP, DRAFTER = "heads", "mtp", "drafter"
"""Kinds of trained drafters: heads of ``train-heads``, a layer of it or layers of the checkpoint, and a model of its
own."""

METHODS = {
    "ar": Method("plain decoding", ""),
    "pld": Method("prompt lookup decoding", "C"),
    "lade": Method("lookahead decoding", "C"),
    "sam": Method("SAM-Decoding: the longest match in the conversation", "C"),
    "suffix": Method(
        "SuffixDecoding: frequent continuations in the conversation and earlier answers", "C", history=True
    ),
    "rest": Method("the corpus index alone (REST)", "S"),
    "hd-paper": Method("Hierarchy Drafting as in its paper", SOURCE_LETTERS),
    "medusa": Method("trained Medusa heads", "", trained=HEADS),
    "amphista": Method("trained Amphista heads", "", trained=HEADS),
    "hydra": Method("trained Hydra or Hydra++ heads", "", trained=HEADS),
    "mtp": Method("multi-token-prediction layers of the checkpoint, or a trained one", "", trained=MTP),
    "drafter": Method("a draft model: speculative decoding with --drafter", "", trained=DRAFTER),
    "hd": Method("context table, history, model store and corpus index in one tree", SOURCE_LETTERS, history=True),
    "logitspec": Method("LogitSpec: last-token logits extended by prompt lookup", "C", "L"),
    "tr": Method("Token Recycling: a static tree over the rankings of all verified tokens", "", "R", history=True),
    "racer": Method("RACER: retrieved n-grams and rankings of all verified tokens", "C", "R", history=True),
    "hd+logitspec": Method(
        "hd with last-token logits and recycled rankings", SOURCE_LETTERS, LOGIT_LETTERS, history=True
    ),
    "hd+amphista": Method("hd with trained Amphista heads", SOURCE_LETTERS, history=True, trained=HEADS),
    "hd+hydra": Method("hd with trained Hydra or Hydra++ heads", SOURCE_LETTERS, history=True, trained=HEADS),
    "hd+mtp": Method("hd with multi-token-prediction layers", SOURCE_LETTERS, history=True, trained=MTP),
    "hd+drafter": Method("hd with a draft model", SOURCE_LETTERS, history=True, trained=DRAFTER),
}
HIERARCHIES = ("hd", *(name for name in METHODS if name.startswith("hd+")))
"""Methods that draft from plug-ins as well."""
TRAINED = tuple(name for name, method in METHODS.items() if method.trained)
TAKE_HEADS = tuple(name for name in TRAINED if METHODS[name].trained in (HEADS, MTP))
"""Methods that draft by what ``train-heads`` made."""
NEED_MODEL = ("lade", *TRAINED)
"""Methods that compute with the model."""
NEED_LOGITS = (*NEED_MODEL, *(name for name, method in METHODS.items() if method.logits))
"""Methods that need the model's computation or its logits, not only its text."""
OPTION_METHODS = {
    "draft_tokens": tuple(name for name in METHODS if name not in ("ar", "lade", "hd-paper")),
    "sources": ("hd-paper", *HIERARCHIES),
    "order": ("hd-paper",),
    "lookahead": ("hd-paper",),
    "heads": TAKE_HEADS,
    "drafter": tuple(name for name in TRAINED if METHODS[name].trained == DRAFTER),
    "prediction": HIERARCHIES,
    "tree": ("medusa", "amphista"),
    "history": tuple(name for name, method in METHODS.items() if method.history),
    "history_prompts": HIERARCHIES,
    "model_db": tuple(name for name, method in METHODS.items() if "M" in method.databases),
    "corpus_db": tuple(name for name, method in METHODS.items() if "S" in method.databases),
}
"""Options that not all methods use, with the methods that use them."""
LARGEST_BUDGET = 64
"""Most draft tokens of one forward pass."""
FIXED_BUDGET = 32
"""Draft tokens per step where the time of passes is unknown."""


def source_letters(option: str, given: str, known: str) -> str:
    """The letters of sources that are given by letters or by names with commas between them."""
    by_name = {SOURCE_NAMES[letter]: letter for letter in known}
    letters = _letters(given, by_name)
    if option == "sources" and not set(letters) <= set(known):
        by_name |= {source.name: source.letter for source in plugins().values()}
        letters, known = _letters(given, by_name), "".join(by_name.values())
    fits = bool(letters) and set(letters) <= set(known) and len(set(letters)) == len(letters)
    require(
        fits, option, given or "nothing", f"names from {', '.join(by_name)}, or letters of {known}, each once at most"
    )
    return letters


def _letters(given: str, by_name: dict[str, str]) -> str:
    return "".join(by_name.get(part.strip(), part.strip()) for part in given.split(","))
