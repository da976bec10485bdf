"""Losslessness where the user is: a method's answers against plain decoding, and that against ``generate``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from hdtool.data.errors import HdtoolError, reason_of
from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.decode import decode, room_for
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.generate_settings import generate_options, refuse_settings
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.model.precision import HIGHER, logits_after, logits_step_by_step, more_precise
from hdtool.runtime.model.quantized_layers import quantised_layers
from hdtool.runtime.sampler import Sampler


class Oracle(StrEnum):
    """What an answer is compared with."""

    PLAIN = "plain"
    """Our own loop with nothing drafted: what the method must equal."""
    GENERATE = "generate"
    """The library's ``model.generate``: what our own loop must equal, where nothing is drawn."""


@dataclass(frozen=True)
class Difference:
    """The first place where two answers part."""

    prompt: str
    oracle: Oracle
    asked: list[int]
    before: list[int]
    """What both had said until there."""
    expected: int | None
    found: int | None
    """The token of either side; None where an answer has ended."""

    @property
    def position(self) -> int:
        """Counted from the first token of the answer, which is 0."""
        return len(self.before)


@dataclass(frozen=True)
class Check:
    """One prompt, answered in all ways."""

    prompt: str
    tokens: int
    steps: int
    differences: list[Difference]

    def equals(self, oracle: Oracle) -> bool:
        return all(difference.oracle is not oracle for difference in self.differences)


@dataclass(frozen=True)
class Measure:
    """What both tokens of a difference are worth, in one precision."""

    dtype: str
    expected: float
    found: float
    """Logits, after penalties and temperature."""
    gap: float
    """How far the two are apart in what decides: in their logits, with their noise where tokens are drawn."""


@dataclass(frozen=True)
class Explanation:
    """Whether rounding explains a difference, and what that rests on."""

    difference: Difference
    working: Measure | None = None
    precise: Measure | None = None
    rounding: float | None = None
    """How far rounding moves what decides, measured at this very place."""
    chosen: int | None = None
    """The token that the more precise computation takes."""
    near_tie: bool = False
    reason: str = ""
    """Why there is no more to tell, if so."""


class Verifier:
    """A loaded model whose answers are checked, with one drafter and one way of choosing tokens."""

    def __init__(self, loaded: Loaded, sampling: SamplingConfig, drafter: Drafter, max_new_tokens: int) -> None:
        refuse_settings(loaded.target.model.generation_config)
        self._loaded = loaded
        self._model = loaded.target.model
        self._sampling = sampling
        self._drafter = drafter
        self._most = max_new_tokens

    @property
    def oracles(self) -> list[Oracle]:
        """``generate`` draws its tokens in another way, so it has a say in greedy decoding only."""
        return [Oracle.PLAIN, Oracle.GENERATE] if self._sampling.is_greedy else [Oracle.PLAIN]

    def check(self, prompt: str, ids: list[int]) -> Check:
        """Answer a prompt in all ways and compare token for token."""
        plain, _ = self._decoded(ids, NoDraft())
        drafted, steps = self._decoded(ids, self._drafter)
        pairs = [(Oracle.PLAIN, plain, drafted)]
        if Oracle.GENERATE in self.oracles:
            pairs.append((Oracle.GENERATE, self._generated(ids), plain))
        found = [_difference(prompt, oracle, ids, expected, said) for oracle, expected, said in pairs]
        return Check(prompt, len(plain), steps, [difference for difference in found if difference])

    def explain(self, differences: Iterable[Difference]) -> list[Explanation]:
        """Compute the parting places once more, plainly, in the working precision and in the next higher one."""
        open_ones = list(differences)
        places = [[*difference.asked, *difference.before] for difference in open_ones]
        working = [logits_after(self._model, place) for place in places]
        names = [str(self._model.dtype).removeprefix("torch.")] * 2
        try:
            if quantised_layers(self._model):  # which has no more precise form
                again = [logits_step_by_step(self._model, one.asked, one.before) for one in open_ones]
                names[1] += ", token by token"
            else:
                again = self._precisely(places) if places else []
                names[1] = str(HIGHER.get(self._model.dtype)).removeprefix("torch.")
        except (HdtoolError, RuntimeError, TypeError) as error:  # no higher type, or code that knows only its own
            reason = f"it cannot be recomputed: {reason_of(error)}"
            return [Explanation(difference, reason=reason) for difference in open_ones]
        return [self._explained(*case, names) for case in zip(open_ones, working, again, strict=True)]

    def _decoded(self, ids: list[int], drafter: Drafter) -> tuple[list[int], int]:
        target, most = self._loaded.target, self._most
        sampler, stops = self._loaded.sampler(self._sampling, ids, max_new_tokens=most)
        steps = list(decode(target, ids, sampler, max_new_tokens=most, stops=stops, drafter=drafter))
        return [token for step in steps for token in step.tokens], len(steps)

    def _generated(self, ids: list[int]) -> list[int]:
        asked = torch.tensor([ids], device=self._model.device)
        room, _ = room_for(self._loaded.target, ids, self._most)
        said: Any = self._model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            tokenizer=self._loaded.tokenizer if self._model.generation_config.stop_strings else None,
            **generate_options(self._sampling, self._model.generation_config, self._loaded.stops, room),
        )
        answer: list[int] = said[0, len(ids) :].tolist()
        return answer

    def _precisely(self, places: Sequence[list[int]]) -> list[torch.Tensor]:
        """On the model's device, or, where that has no room for it, on the CPU."""
        try:
            with more_precise(self._model, self._model.device):
                return [logits_after(self._model, place) for place in places]
        except torch.OutOfMemoryError:
            with more_precise(self._model, torch.device("cpu")):
                return [logits_after(self._model, place) for place in places]

    def _explained(
        self, difference: Difference, working: torch.Tensor, precise: torch.Tensor, names: list[str]
    ) -> Explanation:
        sampler, _ = self._loaded.sampler(self._sampling, difference.asked, max_new_tokens=self._most)
        sampler.context += difference.before
        rough, fine = (sampler.scores(logits.cpu()) for logits in (working, precise))
        if difference.expected is None or difference.found is None:
            return Explanation(difference, chosen=sampler.choose(fine), reason="one of the answers ends here")
        pair = difference.expected, difference.found
        lags = [_lag(sampler.decisive(fine), token) for token in pair]
        rounding = _moved(rough, fine)
        return Explanation(
            difference,
            working=_measure(names[0], rough, pair, sampler),
            precise=_measure(names[1], fine, pair, sampler),
            rounding=rounding,
            chosen=sampler.choose(fine),
            # Each of the two passes may be off by as much, in opposite directions.
            near_tie=max(lags) <= 2 * rounding,
        )


def _difference(
    prompt: str, oracle: Oracle, asked: list[int], expected: list[int], found: list[int]
) -> Difference | None:
    if expected == found:
        return None
    shared = 0
    while shared < min(len(expected), len(found)) and expected[shared] == found[shared]:
        shared += 1
    sides = (said[shared] if shared < len(said) else None for said in (expected, found))
    return Difference(prompt, oracle, asked, found[:shared], *sides)


def _measure(dtype: str, scores: torch.Tensor, pair: tuple[int, int], sampler: Sampler) -> Measure:
    decisive = sampler.decisive(scores)
    expected, found = (float(scores[token]) for token in pair)
    return Measure(dtype, expected, found, float((decisive[pair[0]] - decisive[pair[1]]).abs()))


def _lag(decisive: torch.Tensor, token: int) -> float:
    """How far a token is from being chosen."""
    return float(decisive.max() - decisive[token])


def _moved(rough: torch.Tensor, fine: torch.Tensor) -> float:
    """How far rounding moves a logit, at most."""
    there = rough.isfinite() & fine.isfinite()
    return float((rough - fine)[there].abs().max())
