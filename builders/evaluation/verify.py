"""Verifies losslessness: a method against plain decoding, and plain decoding against ``generate``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from hdtool.builders.evaluation.contenders import DraftingContender, GenerateContender
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.errors import HdtoolError, error_reason
from hdtool.data.prompts import Grammar
from hdtool.runtime.answering.answer_plan import compiler_for, plan_answer
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.model.quantization import quantized_layers
from hdtool.runtime.model.reference_logits import HIGHER_PRECISION, logits_after, logits_step_by_step, more_precise
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.load import Loaded


class Oracle(StrEnum):
    """Reference that an answer is compared with."""

    PLAIN = "plain"
    """hdtool's loop without drafts; the method must give the same tokens."""
    GENERATE = "generate"
    """``generate`` of transformers; hdtool's greedy loop must give the same tokens."""


@dataclass(frozen=True)
class Difference:
    """First position at which two answers differ."""

    prompt: str
    oracle: Oracle
    prompt_ids: list[int]
    shared_ids: list[int]
    """Tokens before the difference, which are equal in both answers."""
    expected: int | None
    actual: int | None
    """Token found instead of ``expected``. Either of the two is None if its answer ends before this position."""
    grammar: Grammar | None = None
    """Grammar that the answers must match."""

    @property
    def position(self) -> int:
        """Zero-based index of the differing token in the answer."""
        return len(self.shared_ids)


@dataclass(frozen=True)
class Check:
    """Result of comparing the answers to one prompt."""

    prompt: str
    tokens: int
    steps: int
    differences: list[Difference]

    def equals(self, oracle: Oracle) -> bool:
        return all(difference.oracle is not oracle for difference in self.differences)


@dataclass(frozen=True)
class Measure:
    """Logits of the expected and the found token, computed in the same precision."""

    dtype: str
    expected: float
    found: float
    """Logit of the found token. Penalties and temperature are applied to both logits."""
    gap: float
    """Absolute difference between the tokens' scores: the logits, plus Gumbel noise when sampling."""


@dataclass(frozen=True)
class Explanation:
    """Evidence for or against rounding as the cause of a difference."""

    difference: Difference
    working: Measure | None = None
    precise: Measure | None = None
    rounding: float | None = None
    """Largest change of any logit between the two precisions at this position."""
    chosen: int | None = None
    """Token chosen by the more precise computation."""
    near_tie: bool = False
    reason: str = ""
    """Why the difference could not be examined; empty if it was."""


class Verifier:
    """Checks the answers of a loaded model with one drafter and one sampling configuration."""

    def __init__(
        self,
        loaded: Loaded,
        sampling: SamplingConfig,
        drafter: Drafter,
        max_new_tokens: int,
        draft_tokens: int | None = None,
    ) -> None:
        """``draft_tokens`` limits the nodes per tree if a grammar is enforced; otherwise, ``drafter`` limits them."""
        self._loaded = loaded
        self._model = loaded.target.model
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._generate = GenerateContender(loaded, self._model, sampling, max_new_tokens)
        self._plain = DraftingContender(loaded, NoDraft(), sampling, max_new_tokens, NoDraft, draft_tokens)
        self._drafted = replace(self._plain, drafter=drafter)
        self._grammars = compiler_for(loaded)

    @property
    def oracles(self) -> list[Oracle]:
        """References to compare with; ``generate`` is left out when sampling, because it draws tokens differently."""
        return [Oracle.PLAIN, Oracle.GENERATE] if self._sampling.is_greedy else [Oracle.PLAIN]

    def check(
        self, prompt: str, ids: list[int], grammar: Grammar | None = None, prediction: Sequence[int] = ()
    ) -> Check:
        """Answer a prompt with and without drafts and, if greedy, by ``generate``; compare the answers' tokens."""
        plain = self._plain.answer(ids, self._grammars.guide_for(grammar))
        drafted = self._drafted.answer(ids, self._grammars.guide_for(grammar), prediction)
        pairs: list[tuple[Oracle, AnsweredTurn, AnsweredTurn]] = [(Oracle.PLAIN, plain, drafted)]
        if Oracle.GENERATE in self.oracles:
            pairs.append((Oracle.GENERATE, self._generate.answer(ids, self._grammars.guide_for(grammar)), plain))
        differences = [
            _first_difference(prompt, oracle, ids, grammar, expected.output_ids, answer.output_ids)
            for oracle, expected, answer in pairs
        ]
        steps = len(drafted.step_tokens)
        return Check(prompt, len(plain.output_ids), steps, [difference for difference in differences if difference])

    def explain(self, differences: Iterable[Difference]) -> list[Explanation]:
        """Explain each difference by logits recomputed in the working precision and in the next higher one.

        Models with quantized layers are recomputed token by token instead of in a higher precision.
        """
        differences = list(differences)
        sequences = [[*difference.prompt_ids, *difference.shared_ids] for difference in differences]
        working = [self._as_decoded(sequence) for sequence in sequences]
        names = [str(self._model.dtype).removeprefix("torch.")] * 2
        try:
            if quantized_layers(self._model):  # quantized layers have no more precise form
                step_by_step = [logits_step_by_step(self._model, one.prompt_ids, one.shared_ids) for one in differences]
                names[1] += ", token by token"
            else:
                step_by_step = self._precisely(sequences) if sequences else []
                names[1] = str(HIGHER_PRECISION.get(self._model.dtype)).removeprefix("torch.")
        except (HdtoolError, RuntimeError, TypeError) as error:  # no higher precision exists, or custom code refuses it
            reason = f"it cannot be recomputed: {error_reason(error)}"
            return [Explanation(difference, reason=reason) for difference in differences]
        return [self._explained(*case, names) for case in zip(differences, working, step_by_step, strict=True)]

    def _as_decoded(self, ids: list[int]) -> torch.Tensor:
        """Return the logits after ``ids``, computed with 8-bit activations if the target's compiled passes use them."""
        target = self._loaded.target
        if target.compiled and target.compiled.activations_are_int8:
            return target.prefill(target.allocate(), 0, ids).logits[0].clone()
        return logits_after(self._model, ids)

    def _precisely(self, sequences: Sequence[list[int]]) -> list[torch.Tensor]:
        """Compute logits in higher precision, on the model's device or, if its memory is too small, on the CPU."""
        try:
            with more_precise(self._model, self._model.device):
                return [logits_after(self._model, sequence) for sequence in sequences]
        except torch.OutOfMemoryError:
            with more_precise(self._model, torch.device("cpu")):
                return [logits_after(self._model, sequence) for sequence in sequences]

    def _explained(
        self, difference: Difference, working: torch.Tensor, precise: torch.Tensor, names: list[str]
    ) -> Explanation:
        guide = self._grammars.guide_for(difference.grammar)
        if guide:
            guide.follow(difference.shared_ids)
        prompt = difference.prompt_ids
        sampler = plan_answer(self._loaded, self._sampling, prompt, self._max_new_tokens, guide).sampler
        sampler.context += difference.shared_ids
        rough, fine = (sampler.scores(logits.cpu()) for logits in (working, precise))
        chosen = sampler.chooser(precise.cpu()[None])(0)
        if difference.expected is None or difference.actual is None:
            return Explanation(difference, chosen=chosen, reason="one of the answers ends here")
        pair = difference.expected, difference.actual
        perturbed = sampler.perturbed_scores(fine)
        lag = max(float(perturbed.max() - perturbed[token]) for token in pair)  # distance to the best score
        there = rough.isfinite() & fine.isfinite()
        rounding = float((rough - fine)[there].abs().max())
        return Explanation(
            difference,
            working=_measure_pair(names[0], rough, pair, sampler),
            precise=_measure_pair(names[1], fine, pair, sampler),
            rounding=rounding,
            chosen=chosen,
            # Both passes may be off by ``rounding``, in opposite directions.
            near_tie=lag <= 2 * rounding,
        )


def _first_difference(
    prompt: str, oracle: Oracle, prompt_ids: list[int], grammar: Grammar | None, expected: list[int], actual: list[int]
) -> Difference | None:
    if expected == actual:
        return None
    shared = 0
    while shared < min(len(expected), len(actual)) and expected[shared] == actual[shared]:
        shared += 1
    expected_token, actual_token = (answer[shared] if shared < len(answer) else None for answer in (expected, actual))
    return Difference(prompt, oracle, prompt_ids, actual[:shared], expected_token, actual_token, grammar)


def _measure_pair(dtype: str, scores: torch.Tensor, pair: tuple[int, int], sampler: Sampler) -> Measure:
    perturbed_scores = sampler.perturbed_scores(scores)
    expected, actual = (float(scores[token]) for token in pair)
    return Measure(dtype, expected, actual, float((perturbed_scores[pair[0]] - perturbed_scores[pair[1]]).abs()))
