"""The split of logged conversations into those that stores are built from and those that measure them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from hdtool.data.errors import RecordError
from hdtool.data.traces import Trace
from hdtool.runtime.config.setup import MOST_HELD_OUT


class Split(NamedTuple):
    learned: list[Trace]
    held_out: list[Trace]


def split(conversations: Sequence[Trace], share: float) -> Split:
    """Hold out about this share of the conversations, chosen by a hash of their first question.

    Conversations that begin with the same question are on the same side, because their answers resemble each other.
    The choice does not depend on the order of the logs.
    """
    groups: dict[str, list[Trace]] = {}
    for conversation in conversations:
        groups.setdefault(_hash_of_opening(conversation), []).append(conversation)
    if len(groups) < 2:
        raise RecordError(
            f"the logs hold {len(conversations)} conversations with {len(groups)} different first questions, and "
            "setup holds some out of the stores to measure with: name logs of more conversations"
        )
    wanted = min(MOST_HELD_OUT, math.ceil(share * len(conversations)))
    found = Split([], [])
    for number, opening in enumerate(sorted(groups), start=1):
        # The last group is always learned from.
        is_held_out = len(found.held_out) < wanted and number < len(groups)
        (found.held_out if is_held_out else found.learned).extend(groups[opening])
    return found


def _hash_of_opening(conversation: Trace) -> str:
    asked = next((m["content"] for m in conversation.messages if m["role"] == "user"), "")
    return hashlib.sha256(" ".join(asked.lower().split()).encode("utf-8", "surrogatepass")).hexdigest()
