"""Choice of the logged conversations that a set-up holds out of its stores."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

from hdtool.data.conversation import USER, Conversation
from hdtool.data.errors import RecordError
from hdtool.runtime.settings.building import MAX_HELD_OUT


def opening_hash(conversation: Conversation) -> bytes:
    """Return a hash of a conversation's first question, ignoring case and whitespace."""
    question = next((turn.text for turn in conversation.turns if turn.role == USER), "")
    return hashlib.sha256(" ".join(question.lower().split()).encode("utf-8", "surrogatepass")).digest()


def choose_held_out(openings: Sequence[bytes], share: float) -> frozenset[bytes]:
    """Choose about ``share`` of the conversations, by hash, to hold out; return the hashes of their first questions.

    ``openings`` has the hash of each conversation's first question, and about ``MAX_HELD_OUT`` at most are held out.
    Conversations with the same first question are held out together or not at all, because their answers resemble each
    other. The choice does not depend on the order of the logs. Raise RecordError for fewer than two first questions.
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
    left = min(MAX_HELD_OUT, math.ceil(share * len(openings)))
    chosen = set()
    for opening in sorted(counts)[:-1]:  # never hold out the last opening
        if left <= 0:
            break
        chosen.add(opening)
        left -= counts[opening]
    return frozenset(chosen)
