"""A few held-out prompts answered on this device: with drafts, without, and by transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from hdtool.builders.setup.offered import offered_methods, options_for, with_offered
from hdtool.data.chat import encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Prompt
from hdtool.data.spec_bench import AnsweredQuestion
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.config.model import INT8
from hdtool.runtime.evaluation.bench import Bench
from hdtool.runtime.evaluation.contenders import Contender, DraftingContender
from hdtool.runtime.evaluation.lineup import Lineup
from hdtool.runtime.evaluation.scores import mean_speed
from hdtool.runtime.evaluation.verify import Verifier
from hdtool.runtime.evaluation.warm_up import questions_to_warm_up
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.stores.store_set import StoreSet

PLAIN, DRAFTED, LIBRARY = "ar", "hd", "generate"
SECONDS = 40.0
"""Plain decoding of the chosen prompts takes about as long."""
FEWEST, MOST, MOST_BY_LIBRARY = 3, 24, 4
"""Prompts; fewer of them suffice for transformers, which is several times slower and only compared with."""


def number_of_prompts(max_new_tokens: int, plain_tokens_per_second: float) -> int:
    """As many as plain decoding answers in about ``SECONDS``."""
    return max(FEWEST, min(MOST, int(SECONDS * plain_tokens_per_second / max_new_tokens)))


def answer(
    loaded: Loaded,
    store_set: StoreSet,
    model: ModelConfig,
    prompts: Sequence[Prompt],
    most_prompts: int,
    max_new_tokens: int,
    chat: bool | None,
    on_progress: Callable[[int], None],
    folder: Path | None = None,
) -> dict[str, Any]:
    """Answer the first prompts that fit the model's context, each with a fresh drafter; transformers answers a few.

    Trained drafters that lie in the ``folder`` of the model, or are layers of its checkpoint, are contenders, too.
    """
    decoding = with_offered(DecodeConfig(max_new_tokens=max_new_tokens), loaded, folder)
    offered = offered_methods(decoding, loaded)
    names = (LIBRARY, PLAIN, DRAFTED, *offered)
    contenders = Lineup(loaded, store_set, model, decoding, SamplingConfig()).contenders(names)
    bench = Bench(loaded, contenders, max_new_tokens, chat)
    asked = [prompt for prompt in prompts if bench.fits(prompt)][:most_prompts]
    if not asked:
        raise PromptError("no held-out conversation fits the model's context: name logs of shorter ones")
    bench.warm_up(questions_to_warm_up(asked, (), 1, bench.fits))
    own = replace(bench, contenders={name: one for name, one in contenders.items() if name != LIBRARY})
    found: list[dict[str, AnsweredQuestion]] = []
    for answered in chain(bench.answers(asked[:MOST_BY_LIBRARY]), own.answers(asked, done=MOST_BY_LIBRARY)):
        found.append(answered)
        on_progress(len(found))
    compared = tuple(name for name in contenders if name != LIBRARY or model.activations != INT8)
    different = [
        prompt for prompt, by_method in zip(asked, found, strict=True) if not _is_identical(by_method, compared)
    ]
    drafting = [one for name, one in contenders.items() if name in (DRAFTED, *offered)]
    return {
        "tokens_per_second": {
            name: mean_speed([by_method[name] for by_method in found if name in by_method]) for name in contenders
        },
        "tokens_per_step": _tokens_per_step(found, DRAFTED),
        "offered": {
            name: {
                "tokens_per_step": _tokens_per_step(found, name),
                "options": list(options_for(name, decoding)),
            }
            for name in offered
        },
        "prompts": len(asked),
        # All methods that answered them gave the same tokens; with activations in 8 bits, all but transformers, which
        # does not round them.
        "identical": len(asked) - len(different),
        # Of the others, those whose differences rounding explains.
        "near_ties": sum(_is_near_tie(loaded, drafting, prompt, max_new_tokens, chat) for prompt in different),
    }


def _tokens_per_step(found: Sequence[dict[str, AnsweredQuestion]], name: str) -> float:
    return fmean(tokens for by_method in found for tokens in by_method[name].step_tokens)


def _is_identical(by_method: dict[str, AnsweredQuestion], compared: Sequence[str]) -> bool:
    first, *others = (by_method[method].output_ids for method in compared if method in by_method)
    return all(other == first for other in others)


def _is_near_tie(
    loaded: Loaded, drafting: Sequence[Contender], prompt: Prompt, max_new_tokens: int, chat: bool | None
) -> bool:
    """Whether rounding explains every difference between the methods."""
    ids = encode_conversation(loaded.tokenizer, prompt.messages, chat=chat, tools=prompt.tools)
    for contender in drafting:
        assert isinstance(contender, DraftingContender)
        verifier = Verifier(loaded, SamplingConfig(), contender.new_drafter(), max_new_tokens)
        check = verifier.check(prompt.id, ids, prompt.grammar)
        if not all(explanation.near_tie for explanation in verifier.explain(check.differences)):
            return False
    return True
