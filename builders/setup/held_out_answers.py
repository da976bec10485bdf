"""Held-out prompts of a set-up, answered with each method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from hdtool.builders.evaluation.bench import Bench
from hdtool.builders.evaluation.bench_plan import ContenderFactory, warm_up_questions
from hdtool.builders.evaluation.contenders import DraftingContender
from hdtool.builders.evaluation.experiment import identical
from hdtool.builders.evaluation.scores import mean_speed, timings_of
from hdtool.builders.evaluation.timing import doubt
from hdtool.builders.evaluation.verify import Verifier
from hdtool.builders.setup.trained_drafters import method_options, usable_drafter_methods, with_model_drafters
from hdtool.data.answered_questions import AnsweredQuestion
from hdtool.data.chat import encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import Prompt
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import INT8, ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded

PLAIN_NAME, DRAFTED_NAME, GENERATE_NAME = "ar", "hd", "generate"
PLAIN_SECONDS = 40.0
"""Approximate time, in seconds, that plain decoding of the chosen prompts should take."""
MIN_PROMPTS, MAX_PROMPTS, MAX_GENERATE_PROMPTS = 3, 24, 4
"""Limits for the number of prompts; transformers answers fewer because it is several times slower."""


def number_of_prompts(max_new_tokens: int, plain_tokens_per_second: float) -> int:
    """Return how many prompts plain decoding answers with ``max_new_tokens`` tokens each in ``PLAIN_SECONDS``.

    The result is clamped to ``[MIN_PROMPTS, MAX_PROMPTS]``.
    """
    return max(MIN_PROMPTS, min(MAX_PROMPTS, int(PLAIN_SECONDS * plain_tokens_per_second / max_new_tokens)))


def answer_prompts(
    loaded: Loaded,
    store_set: StoreSet,
    model: ModelConfig,
    sampling: SamplingConfig,
    prompts: Sequence[Prompt],
    max_prompts: int,
    max_new_tokens: int,
    chat: bool | None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Answer the first prompts that fit the context with every method; return speeds and counts of identical answers.

    Every answer uses a fresh drafter. ``generate`` of transformers answers only a few prompts. Trained drafters that
    lie in the model's ``folder`` or are layers of its checkpoint take part too. Raise a PromptError if no prompt fits.
    """
    decoding = with_model_drafters(DecodeConfig(max_new_tokens=max_new_tokens), loaded, folder)
    offered = usable_drafter_methods(decoding, loaded)
    names = (GENERATE_NAME, PLAIN_NAME, DRAFTED_NAME, *offered)
    contenders = ContenderFactory(loaded, store_set, model, decoding, sampling).contenders(names)
    bench = Bench(loaded, contenders, max_new_tokens, chat)
    questions = [prompt for prompt in prompts if bench.fits(prompt)][:max_prompts]
    if not questions:
        raise PromptError("no held-out conversation fits the model's context: name logs of shorter ones")
    bench.warm_up(warm_up_questions(questions, (), 1, bench.fits))
    without_generate = replace(
        bench, contenders={name: contender for name, contender in contenders.items() if name != GENERATE_NAME}
    )
    answers: list[dict[str, AnsweredQuestion]] = []
    with progress_bar(len(questions), "prompts") as progress:
        for answered in chain(
            bench.answers(questions[:MAX_GENERATE_PROMPTS]),
            without_generate.answers(questions, done=MAX_GENERATE_PROMPTS),
        ):
            answers.append(answered)
            progress.advance()
    compares_generate = sampling.is_greedy and model.activations != INT8
    compared = tuple(name for name in contenders if name != GENERATE_NAME or compares_generate)
    different = [
        prompt
        for prompt, by_method in zip(questions, answers, strict=True)
        if not identical([by_method[name] for name in compared if name in by_method])
    ]
    by_name = {name: [by_method[name] for by_method in answers if name in by_method] for name in contenders}
    drafting = [one for name, one in contenders.items() if isinstance(one, DraftingContender) and name != PLAIN_NAME]
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
        # because it does not round activations; when sampling, because it draws tokens differently.
        "identical": len(questions) - len(different),
        # Other prompts whose differences are explained by rounding.
        "near_ties": sum(_is_near_tie(drafting, prompt, chat) for prompt in different),
    }


def _tokens_per_step(answers: Sequence[dict[str, AnsweredQuestion]], name: str) -> float:
    return fmean(tokens for by_method in answers for tokens in by_method[name].step_tokens)


def _is_near_tie(drafting: Sequence[DraftingContender], prompt: Prompt, chat: bool | None) -> bool:
    """Return True if rounding explains every difference between the methods' answers to the prompt."""
    for contender in drafting:
        loaded = contender.loaded
        ids = encode_conversation(loaded.tokenizer, prompt.messages, chat=chat, tools=prompt.tools)
        verifier = Verifier(loaded, contender.sampling, contender.new_drafter(), contender.max_new_tokens)
        check = verifier.check(prompt.id, ids, prompt.grammar)
        if not all(explanation.near_tie for explanation in verifier.explain(check.differences)):
            return False
    return True
