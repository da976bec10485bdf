"""How the next token is chosen from the target's logits, the same way wherever they were computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hdtool.data.errors import ModelError
from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.kernels.topk import argmax_at, likeliest
from hdtool.runtime.random_draws import Draws

NOT_FINITE = -1
"""In place of a token: the logits are NaN or infinite."""


class Sampler:
    """Chooses tokens one after another; it is told each choice that stands, so that it knows the context.

    The choice at a position depends on the context before it, its logits and the draws for that
    position. Whether the logits came from plain decoding or from a node of a tree plays no part,
    which is why drafting changes nothing in what is said.
    """

    def __init__(
        self,
        config: SamplingConfig,
        context: Sequence[int],
        *,
        processors: LogitsProcessorList | None = None,
        padding: Sequence[int] = (),
    ) -> None:
        """``processors`` replace those of ``config``, of which then only the seed counts, and whether it is greedy.

        Processors see ``padding`` in front of the context; the model has never read it.
        """
        self._greedy = config.is_greedy
        self._processors = processors_of(config) if processors is None else processors
        self.only_argmax = self._greedy and not self._processors
        """Whether the arg-max of the logits is all that is needed."""
        self._draws = Draws(config.seed)
        self._ids = _GrowingIds(padding)
        self.context = list(context)
        self.overflowed = False
        """Whether the highest logit of any row that was looked at was NaN or infinite."""

    def over(self, logits: torch.Tensor, *, finite_only: bool = False) -> Callable[[int], int]:
        """A function from a row of ``logits`` to the token chosen there, given the context so far.

        With ``finite_only``, it returns ``NOT_FINITE`` for a row whose highest logit is NaN or infinite, and nothing
        else has happened then: no processor was called.
        """
        if self.only_argmax:
            best = argmax_at(logits)

            def choose(row: int) -> int:
                token, finite = best(row)
                self.overflowed |= not finite
                return token if finite or not finite_only else NOT_FINITE

            return choose

        def process(row: int) -> int:
            finite = bool(logits[row].max().isfinite())
            self.overflowed |= not finite
            return self.choose_processed(logits, row) if finite or not finite_only else NOT_FINITE

        return process

    def choose_processed(self, logits: torch.Tensor, row: int) -> int:
        """The token chosen at a row by its processed scores."""
        return self.choose(self.scores(logits[row]))

    def ids(self, device: torch.device) -> torch.LongTensor:
        """The context so far, ``[1, length]``, as processors and stopping criteria read it."""
        return self._ids.of(self.context, device)

    @torch.no_grad()  # not inference mode: processors of others may keep what they make, and use it elsewhere
    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """What the processors make of one row of logits, given the context so far; the row stays as it is."""
        given = cast(torch.FloatTensor, logits[None].to(torch.float32, copy=True))
        return self._processors(self.ids(logits.device), given)[0]

    @torch.no_grad()
    def choose(self, scores: torch.Tensor) -> int:
        if self._greedy:
            return int(likeliest(scores))
        token = self._draws.first(len(self.context), scores.softmax(dim=-1).cpu().numpy())
        if token < 0:
            raise ModelError("the model's logits are not numbers: its dtype may be too small, try --dtype float32")
        return token

    def decisive(self, scores: torch.Tensor) -> torch.Tensor:
        """What the choice goes by, the highest winning: the scores, and where tokens are drawn their noise on top.

        The logarithm of how early a token arrives in the race of ``Draws``, but for a constant.
        """
        scores = scores.double().cpu()
        if self._greedy:
            return scores
        drawn = torch.from_numpy(self._draws.at(len(self.context), len(scores)))
        return scores - (-(-drawn).log1p()).log()


class _GrowingIds:
    """A context as a tensor; it grows in place, where a new tensor for each token would cost its length."""

    def __init__(self, padding: Sequence[int]) -> None:
        self._padding = list(padding)
        self._ids = torch.empty((1, 0), dtype=torch.long)
        self._filled = 0

    @torch.no_grad()
    def of(self, context: list[int], device: torch.device) -> torch.LongTensor:
        length = len(self._padding) + len(context)
        if self._ids.shape[1] < length or self._ids.device != device:
            self._ids = torch.empty((1, 2 * length), dtype=torch.long, device=device)
            self._filled = 0
        if self._filled < length:
            new = context[self._filled - len(self._padding) :] if self._filled else [*self._padding, *context]
            self._ids[0, self._filled : length] = torch.tensor(new, device=device)
            self._filled = length
        return cast(torch.LongTensor, self._ids[:, :length])


def processors_of(config: SamplingConfig) -> LogitsProcessorList:
    """The processors of explicit settings alone, in the order of ``generate``; what is None changes nothing.

    ``runtime/generate_settings.py`` has those that ``generate`` would use, the model's own settings included.
    """
    chosen = LogitsProcessorList()
    if config.repetition_penalty not in (None, 1.0):
        chosen.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.is_greedy:
        return chosen
    if config.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        chosen.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1.0:
        chosen.append(TopPLogitsWarper(config.top_p))
    return chosen
