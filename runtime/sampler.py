"""How the next token is chosen from the target's logits, the same way wherever they were computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

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
from hdtool.runtime.draws import Draws
from hdtool.runtime.likeliest import likeliest, likeliest_at

if TYPE_CHECKING:
    from transformers import GenerationConfig


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
        generation: GenerationConfig | None = None,
        *,
        processors: LogitsProcessorList | None = None,
        padding: Sequence[int] = (),
    ) -> None:
        """``processors`` stand in for those of ``config``, which then says whether to draw and the seed.

        Processors see ``padding`` in front of the context; the model has never read it.
        """
        self._greedy = config.is_greedy
        self._processors = processors_of(config, generation) if processors is None else processors
        self._draws = Draws(config.seed)
        self._ids = _GrowingIds(padding)
        self.context = list(context)

    def over(self, logits: torch.Tensor) -> Callable[[int], int]:
        """A function from a row of ``logits`` to the token chosen there, given the context so far."""
        if self._greedy and not self._processors:
            return likeliest_at(logits)
        return lambda row: self.choose(self.scores(logits[row]))

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


def processors_of(config: SamplingConfig, generation: GenerationConfig | None) -> LogitsProcessorList:
    """The processors of ``generate``, in its order; settings that are None are the model's own."""
    penalty = first_given(config.repetition_penalty, getattr(generation, "repetition_penalty", None), 1.0)
    chosen = LogitsProcessorList()
    if penalty != 1.0:
        chosen.append(RepetitionPenaltyLogitsProcessor(penalty))
    if config.is_greedy:
        return chosen
    if config.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(config.temperature))
    if top_k := int(first_given(config.top_k, getattr(generation, "top_k", None), 0)):
        chosen.append(TopKLogitsWarper(top_k))
    if (top_p := first_given(config.top_p, getattr(generation, "top_p", None), 1.0)) < 1.0:
        chosen.append(TopPLogitsWarper(top_p))
    return chosen


def first_given(*settings: float | None) -> float:
    """A setting: what was asked for, else the model's own, else the usual."""
    return next(setting for setting in settings if setting is not None)
