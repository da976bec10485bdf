"""The mask of a grammar as a logits processor of ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from transformers import LogitsProcessor

from hdtool.runtime.grammar.guide import Guide
from hdtool.runtime.kernels.compiled import Array


def masks_of(guide: Guide | None) -> list[LogitsProcessor]:
    """The processors of an answer: the mask of its grammar, if there is one."""
    return [GrammarProcessor(guide)] if guide else []


class GrammarProcessor(LogitsProcessor):
    """Gives the tokens that a grammar forbids the score of minus infinity; for one answer."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        self._asked: int | None = None
        """Tokens of the prompt, padding included."""

    def allowed(self, context: Sequence[int], tokens: list[int]) -> int:
        """How many of these tokens are surely allowed after the context, which is much faster than a mask."""
        self._follow(context)
        return self._guide.allowed(tokens)

    def bits(self, context: Sequence[int]) -> Array:
        self._follow(context)
        return self._guide.bits()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._follow(input_ids[0])
        forbidden = self._guide.forbidden(scores.device, scores.shape[-1])
        return cast(torch.FloatTensor, scores.masked_fill(forbidden, -torch.inf))

    def _follow(self, context: Sequence[int] | torch.Tensor) -> None:
        if self._asked is None:
            self._asked = len(context) - self._guide.length
        new = context[self._asked + self._guide.length :]
        self._guide.extend(new.tolist() if isinstance(new, torch.Tensor) else list(new))
