"""Rollouts: earlier answers to each prompt, from which later answers to it are drafted.

Reinforcement learning asks the same prompts in every epoch, and several times in a batch. A history of all answers
finds the latest places of two tokens, which soon belong to other prompts; these answers are found by their prompt.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from hdtool.data.errors import OptionError
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.token_log import MAX_MATCHES

MAX_ANSWERS = MAX_MATCHES
"""Answers to one prompt that are kept: a drafter reads as many places after the same tokens."""
TAIL = 8
"""Last tokens of the prompt that are put before each answer, so that a draft finds where answers begin."""


class Rollouts:
    """Earlier answers by prompt, bounded in tokens; those of the prompts asked longest ago go first."""

    def __init__(self, most: int) -> None:
        """At most ``most`` tokens of answers are kept; prompts are kept as hashes."""
        if most < 0:
            raise OptionError(f"rollouts is {most}, but it is a number of tokens to keep: give 0 or more")
        self._most = most
        self._answers: OrderedDict[bytes, deque[Ints]] = OrderedDict()
        self.tokens = 0
        """Tokens of all answers that are kept."""

    def __bool__(self) -> bool:
        return self._most > 0

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self._answers)

    def prediction(self, prompt: Sequence[int], given: Sequence[int] = ()) -> list[int]:
        """The earlier answers to a prompt as one prediction, the latest last, before the one that was ``given``."""
        key = _key_of(prompt)
        earlier = self._answers.get(key, ())
        if not earlier:
            return list(given)
        self._answers.move_to_end(key)
        tail, predicted = list(prompt[-TAIL:]), list[int]()
        for answer in [*earlier, *([given] if given else [])]:
            predicted += tail if predicted else []
            predicted += np.asarray(answer).tolist()
        return predicted

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, and drop old ones that there is no room for."""
        if not self._most or not answer:
            return
        key, kept = _key_of(prompt), np.array(answer[: self._most], np.int32)
        answers = self._answers.setdefault(key, deque())
        self._answers.move_to_end(key)
        answers.append(kept)
        self.tokens += len(kept)
        if len(answers) > MAX_ANSWERS:
            self.tokens -= len(answers.popleft())
        while self.tokens > self._most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest answer to the prompt that was asked longest ago."""
        key, answers = next(iter(self._answers.items()))
        self.tokens -= len(answers.popleft())
        if not answers:
            del self._answers[key]


def _key_of(prompt: Sequence[int]) -> bytes:
    return blake2b(np.array(prompt, np.int64).tobytes(), digest_size=16).digest()
