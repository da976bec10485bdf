"""The ways of drafting, and the letters of what they draw on."""

from __future__ import annotations

from typing import NamedTuple

SOURCE_LETTERS = "CMS"
"""Of the three databases, as ``order`` and ``use`` name them: context table, model store, corpus index."""
LOGIT_LETTERS = "LKR"
"""Of the sources that listen to the model's logits: the last logit, copied logits, recycled logits."""


class Method(NamedTuple):
    """A way of drafting."""

    description: str
    databases: str
    """The letters of those that it draws on; C is the conversation, however it is looked through."""
    logits: str = ""
    """The letters of what it takes from the model's logits."""


METHODS = {
    "ar": Method("plain decoding, nothing is drafted", ""),
    "pld": Method("prompt lookup: what followed the last words where they stood before", "C"),
    "lade": Method("lookahead decoding: guesses refined beside the answer", "C"),
    "rest": Method("the corpus index alone", "S"),
    "hd-paper": Method("Hierarchy Drafting as its paper has it", SOURCE_LETTERS),
    "medusa": Method("trained heads, each on its own", ""),
    "amphista": Method("trained heads that look at each other", ""),
    "hd": Method("context table, model store and corpus index, the likeliest paths of all three", SOURCE_LETTERS),
    "logitspec": Method(
        "LogitSpec: the likeliest of the last logit, and what followed each in the conversation", "C", "L"
    ),
    "hd+logitspec": Method(
        "hd and what the model's own logits say, in one tree: the last ones, copied and recycled ones",
        SOURCE_LETTERS,
        LOGIT_LETTERS,
    ),
    "hd+amphista": Method("hd and trained heads, in one tree", SOURCE_LETTERS),
}
NEED_HEADS = ("medusa", "amphista", "hd+amphista")
NEED_LOGITS = ("lade", *NEED_HEADS, *(name for name, method in METHODS.items() if method.logits))
"""Methods that draft from what the model computes, not from what it says alone."""
LARGEST_BUDGET = 64
"""Nodes that go into one forward pass at most, the root aside."""
FIXED_BUDGET = 32
"""Nodes a step where there is nothing to choose their number by."""
