"""The split of logged conversations into those that stores are built from and those that measure them."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

from hdtool.data.conversations.conversation import USER, Conversation
from hdtool.data.errors import RecordError
from hdtool.runtime.config.setup import MOST_HELD_OUT


def opening_of(conversation: Conversation) -> bytes:
    """A hash of the first question; case and spaces do not count."""
    asked = next((turn.text for turn in conversation.turns if turn.role == USER), "")
    return hashlib.sha256(" ".join(asked.lower().split()).encode("utf-8", "surrogatepass")).digest()


def held_out(openings: Sequence[bytes], share: float) -> frozenset[bytes]:
    """The openings of the conversations to hold out: about this share of all conversations, chosen by hash.

    Conversations with one opening are on the same side, because their answers resemble each other. The choice does not
    depend on the order of the logs.
    """
    if not openings:
        raise RecordError(
            "the logs hold no answers of a model: collect the model's answers to their questions with hdtool collect"
        )
    counts = Counter(openings)
    if len(counts) < 2:
        raise RecordError(
            f"all {len(openings)} conversations in the logs begin with the same question, and setup holds others out "
            "of the stores to measure with: name more logs"
        )
    left = min(MOST_HELD_OUT, math.ceil(share * len(openings)))
    chosen = set()
    for opening in sorted(counts)[:-1]:  # the last one is always learned from
        if left <= 0:
            break
        chosen.add(opening)
        left -= counts[opening]
    return frozenset(chosen)
