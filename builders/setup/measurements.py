"""Measurements of a set-up: replays by source, speed predictions, and held-out prompts answered with each method."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.builders.evaluation.bench import Bench
from hdtool.builders.evaluation.bench_plan import ContenderFactory, warm_up_questions
from hdtool.builders.evaluation.contenders import Contender, DraftingContender, answer_steps
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult, SpeedPrediction
from hdtool.builders.evaluation.scores import mean_speed, timings_of
from hdtool.builders.evaluation.timing import doubt, timed
from hdtool.builders.evaluation.verify import Verifier
from hdtool.builders.evaluation.worker_pool import replay, total_turns
from hdtool.data.chat import encode_conversation
from hdtool.data.conversation_shapes import AnsweredQuestion
from hdtool.data.errors import HdtoolError, PromptError
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import Prompt
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config import METHODS, DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.config.decoding import (
    DRAFT_MODEL,
    HEADS_DRAFTER,
    HIERARCHIES,
    HISTORY_LETTER,
    MTP_DRAFTER,
    NO_HISTORY,
    SOURCE_NAMES,
)
from hdtool.runtime.config.model import INT8
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.drafters.heads.checkpoint import SETTINGS_FILE, read_settings
from hdtool.runtime.drafters.trained.proposal import SMALL_MODEL, PublishedDrafter
from hdtool.runtime.drafters.trained_methods import methods_with_drafters, trained_drafter
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.model.fingerprint import fingerprint
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded


def with_model_drafters(decoding: DecodeConfig, loaded: Loaded, folder: Path | None) -> DecodeConfig:
    """Return ``decoding``, plus any trained heads and drafter found in the model's folder."""
    target = fingerprint(loaded.target.model)
    heads, drafter = list[str](), decoding.drafter
    drafter_folders = (
        [folder_entry for folder_entry in sorted(folder.iterdir()) if (folder_entry / SETTINGS_FILE).is_file()]
        if folder
        else []
    )
    for folder_entry in drafter_folders:
        try:
            if read_settings(folder_entry)["target"] == target:
                heads.append(str(folder_entry))
            continue
        except HdtoolError:
            pass  # not a folder of heads
        try:
            if PublishedDrafter.named(str(folder_entry)).kind != SMALL_MODEL:
                drafter = drafter or str(folder_entry)
        except HdtoolError:
            continue
    return replace(decoding, heads=(*decoding.heads, *heads), drafter=drafter)


def usable_drafter_methods(decoding: DecodeConfig, loaded: Loaded) -> list[str]:
    """Return the ``HIERARCHIES`` methods with a trained drafter that is usable; print a note for each unusable one."""
    methods = []
    tokenizer = TokenizerFingerprint.of(loaded.tokenizer)
    there = methods_with_drafters(decoding, loaded.target.model)
    for method in HIERARCHIES:
        if method not in there:
            continue
        try:
            trained_drafter(replace(decoding, method=method), loaded.target, tokenizer)
            methods.append(method)
        except HdtoolError as error:
            print(f"note: {method} is left out: {error}", file=sys.stderr)
    return methods


def method_options(method: str, decoding: DecodeConfig) -> tuple[str, ...]:
    """Return the command line options that select a method and its trained drafter."""
    kind = METHODS[method].trained
    heads = (
        [part for folder in decoding.heads for part in ("--heads", folder)]
        if kind in (HEADS_DRAFTER, MTP_DRAFTER)
        else []
    )
    drafter = ["--drafter", decoding.drafter] if kind == DRAFT_MODEL and decoding.drafter else []
    return ("--method", method, *heads, *drafter)


PROMPT_LENGTHS = (16, 128, 1024)
"""Lengths, in tokens, of the prompts whose prefill is timed."""
PREFILLS = 2
"""Number of prefills per length; the fastest prefill counts."""
ANSWER_TOKENS = 24
"""Number of tokens of the plain answer from which the host time per step is measured."""

Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Overhead:
    """Times that a cost curve does not include: prefill time by prompt length, and host time per step."""

    lengths: tuple[int, ...]
    """Measured prompt lengths, in tokens."""
    prefill_seconds: tuple[float, ...]
    host_seconds: float
    """Seconds per step outside the forward pass."""

    @classmethod
    def measured(cls, loaded: Loaded) -> Overhead:
        target, vocabulary = loaded.target, loaded.target.config.vocab_size
        limit = target.context_limit(max(PROMPT_LENGTHS))
        lengths = tuple(length for length in PROMPT_LENGTHS if limit is None or length < limit)
        fastest = []
        for length in lengths:
            prefill = partial(target.prefill, target.allocate(), 0, some_context(length, vocabulary))
            fastest.append(min(timed(target.device, prefill)[1] for _ in range(PREFILLS)))
        answer = answer_steps(loaded, NoDraft(), SamplingConfig(), ANSWER_TOKENS, some_context(lengths[0], vocabulary))
        steps = list(answer)[1:]  # the first step is the prefill
        host = float(np.median([step.seconds - step.verify_seconds for step in steps])) if steps else 0.0
        return cls(lengths, tuple(fastest), host)

    def predict(self, result: ReplayResult, curve: CostCurve) -> SpeedPrediction:
        """Predict tokens per second of a replayed method and plain decoding, averaged over answers as in ``bench``."""
        prompts = np.array([turn.prompt_tokens for turn in result.turns])
        # The first step of a turn is its prefill.
        prefills = self._prefills(prompts) - curve.seconds_of_passes(np.zeros(len(prompts)), prompts)
        drafted, plain = [], []
        for turn, prefill in zip(result.turns, prefills, strict=True):
            tokens, steps = len(turn.tokens), len(turn.nodes)
            places = turn.prompt_tokens + np.arange(tokens)
            one_by_one = curve.seconds_of_passes(np.zeros(tokens), places).sum() + prefill + tokens * self.host_seconds
            trees = curve.seconds_of_passes(turn.nodes, turn.contexts).sum() + prefill + steps * self.host_seconds
            plain.append(tokens / one_by_one)
            drafted.append(tokens / (trees + turn.draft_seconds.sum() + turn.observe_seconds.sum()))
        return SpeedPrediction(fmean(drafted), fmean(plain))

    def _prefills(self, prompts: Floats) -> Floats:
        """Return each prefill's time in seconds, interpolated or, beyond the longest measured prompt, extrapolated."""
        seconds: Floats = np.interp(prompts, self.lengths, self.prefill_seconds)
        if len(self.lengths) > 1:
            rise = self.prefill_seconds[-1] - self.prefill_seconds[-2]
            slope = max(0.0, rise) / (self.lengths[-1] - self.lengths[-2])
            seconds = seconds + slope * np.maximum(0, prompts - self.lengths[-1])
        return seconds


def replay_by_source(
    conversations: Sequence[Sequence[RecordedTurn]],
    store_set: StoreSet,
    curve: CostCurve,
    overhead: Overhead,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Measure tokens per step as sources are added one by one, and predict tokens per second.

    The predictions use all sources but the history, which starts empty.
    """
    stores = {"M": store_set.model, "S": store_set.corpus}
    letters = "C" + "".join(letter for letter, store in stores.items() if store)
    contenders = [_cold_method(letters[: index + 1], curve) for index in range(len(letters))]
    cold = contenders[-1].name
    contenders.append(ReplayMethod(SOURCE_NAMES[HISTORY_LETTER], DecodeConfig(sources=HISTORY_LETTER + letters), curve))
    with progress_bar(total_turns(contenders, conversations, ()), "turns", quiet=quiet) as progress:
        replayed = replay(contenders, conversations, store_set, on_progress=progress.to)
    predicted = overhead.predict(replayed[cold], curve)
    return {
        "tokens_per_step": {name: round(result.tokens_per_step, 3) for name, result in replayed.items()},
        "accepted": {str(source): share.accepted for source, share in replayed[cold].by_source().items()},
        "draft_tokens_per_step": round(replayed[cold].nodes_per_step, 1),
        "tokens_per_second": predicted.tokens_per_second,
        "plain_tokens_per_second": predicted.plain_tokens_per_second,
    }


def replay_with_model_store(
    conversations: Sequence[Sequence[RecordedTurn]], store_set: StoreSet, curve: CostCurve, *, quiet: bool
) -> float:
    """Return the tokens per step with only the conversation and the model store as sources."""
    contender = _cold_method("CM", curve)
    with progress_bar(total_turns([contender], conversations, ()), "turns", quiet=quiet) as progress:
        replayed = replay([contender], conversations, store_set, on_progress=progress.to)
    return round(replayed[contender.name].tokens_per_step, 3)


def _cold_method(letters: str, curve: CostCurve) -> ReplayMethod:
    """Return a method without history that drafts from the given sources and is named after the last source."""
    return ReplayMethod(SOURCE_NAMES[letters[-1]], DecodeConfig(sources=letters, history=NO_HISTORY), curve)


PLAIN_NAME, DRAFTED_NAME, GENERATE_NAME = "ar", "hd", "generate"
PLAIN_SECONDS = 40.0
"""Approximate time, in seconds, that plain decoding of the chosen prompts should take."""
MIN_PROMPTS, MAX_PROMPTS, MAX_GENERATE_PROMPTS = 3, 24, 4
"""Limits for the number of prompts; transformers answers fewer because it is several times slower."""


def number_of_prompts(max_new_tokens: int, plain_tokens_per_second: float) -> int:
    """Return how many prompts plain decoding answers in ``PLAIN_SECONDS``.

    The result is clamped to ``[MIN_PROMPTS, MAX_PROMPTS]``.
    """
    return max(MIN_PROMPTS, min(MAX_PROMPTS, int(PLAIN_SECONDS * plain_tokens_per_second / max_new_tokens)))


def answer_prompts(
    loaded: Loaded,
    store_set: StoreSet,
    model: ModelConfig,
    prompts: Sequence[Prompt],
    max_prompts: int,
    max_new_tokens: int,
    chat: bool | None,
    on_progress: Callable[[int], None],
    folder: Path | None = None,
) -> dict[str, Any]:
    """Answer the first prompts that fit the context with every method; return speeds and counts of identical answers.

    Every answer uses a fresh drafter. ``generate`` of transformers answers only a few prompts. Trained drafters that
    lie in the model's ``folder`` or are layers of its checkpoint take part too.
    """
    decoding = with_model_drafters(DecodeConfig(max_new_tokens=max_new_tokens), loaded, folder)
    offered = usable_drafter_methods(decoding, loaded)
    names = (GENERATE_NAME, PLAIN_NAME, DRAFTED_NAME, *offered)
    contenders = ContenderFactory(loaded, store_set, model, decoding, SamplingConfig()).contenders(names)
    bench = Bench(loaded, contenders, max_new_tokens, chat)
    questions = [prompt for prompt in prompts if bench.fits(prompt)][:max_prompts]
    if not questions:
        raise PromptError("no held-out conversation fits the model's context: name logs of shorter ones")
    bench.warm_up(warm_up_questions(questions, (), 1, bench.fits))
    without_generate = replace(
        bench, contenders={name: contender for name, contender in contenders.items() if name != GENERATE_NAME}
    )
    answers: list[dict[str, AnsweredQuestion]] = []
    for answered in chain(
        bench.answers(questions[:MAX_GENERATE_PROMPTS]), without_generate.answers(questions, done=MAX_GENERATE_PROMPTS)
    ):
        answers.append(answered)
        on_progress(len(answers))
    compared = tuple(name for name in contenders if name != GENERATE_NAME or model.activations != INT8)
    different = [
        prompt for prompt, by_method in zip(questions, answers, strict=True) if not _is_identical(by_method, compared)
    ]
    by_name = {name: [by_method[name] for by_method in answers if name in by_method] for name in contenders}
    drafting = [contender for name, contender in contenders.items() if name in (DRAFTED_NAME, *offered)]
    return {
        "tokens_per_second": {name: mean_speed(answered) for name, answered in by_name.items()},
        "doubt": doubt(timings_of(by_name)),
        "tokens_per_step": _tokens_per_step(answers, DRAFTED_NAME),
        "offered": {
            name: {
                "tokens_per_step": _tokens_per_step(answers, name),
                "options": list(method_options(name, decoding)),
            }
            for name in offered
        },
        "prompts": len(questions),
        # Prompts for which all methods gave the same tokens. With 8-bit activations, transformers is not compared,
        # because it does not round activations.
        "identical": len(questions) - len(different),
        # Other prompts whose differences are explained by rounding.
        "near_ties": sum(_is_near_tie(loaded, drafting, prompt, max_new_tokens, chat) for prompt in different),
    }


def _tokens_per_step(answers: Sequence[dict[str, AnsweredQuestion]], name: str) -> float:
    return fmean(tokens for by_method in answers for tokens in by_method[name].step_tokens)


def _is_identical(by_method: dict[str, AnsweredQuestion], compared: Sequence[str]) -> bool:
    first, *others = (by_method[method].output_ids for method in compared if method in by_method)
    return all(other == first for other in others)


def _is_near_tie(
    loaded: Loaded, drafting: Sequence[Contender], prompt: Prompt, max_new_tokens: int, chat: bool | None
) -> bool:
    """Return True if rounding explains every difference between the methods' answers to the prompt."""
    ids = encode_conversation(loaded.tokenizer, prompt.messages, chat=chat, tools=prompt.tools)
    for contender in drafting:
        assert isinstance(contender, DraftingContender)
        verifier = Verifier(loaded, SamplingConfig(), contender.new_drafter(), max_new_tokens)
        check = verifier.check(prompt.id, ids, prompt.grammar)
        if not all(explanation.near_tie for explanation in verifier.explain(check.differences)):
            return False
    return True
