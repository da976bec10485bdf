"""Long scenarios on a simulated CUDA device: families with every sampling setting, bfloat16, grammars and methods.

``python -m tests.support.device_long_scenarios GROUP,... [ARGUMENT ...]``
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hdtool.data.prompts import Grammar, Prompt
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config.building import HeadsConfig
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Request
from hdtool.runtime.core.session import decode_batch
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.drafters.trained_methods import StandaloneDrafter, drafter_of
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, output_tokens, run
from tests.support.device_scenarios import (
    GREEDY,
    MAX_NEW_TOKENS,
    PROMPT,
    SAMPLED,
    diagnostics,
    hierarchy,
    main,
    plain,
    wrong_drafter,
)
from tests.support.families import model_of
from tests.support.heads import random_for
from tests.support.json_schemas import JSON_SCHEMAS
from tests.support.oracle import generated, plain_logits, prompt_of
from tests.support.simulated_cuda.install import install, on_device
from tests.support.simulated_cuda.queue import DEVICE

LENGTHS = 5, 40, 17, 70
"""Prompt lengths of a batch."""
FEW_SAMPLINGS = "greedy", "T 1, top-k 5, penalised"
"""Sampling settings with drafters other than ``hd``."""
SLOTS = 3
SCHEMAS = "sentiment", "tool choice"
NEARLY_FULL = prompt_of(480)
"""Prompt that leaves less room in the models' context than an answer needs."""
METHODS = "ar", "pld", "lade", "sam", "suffix", "hd-paper", "hd", "logitspec", "tr", "racer", "hd+logitspec"
NO_STORES = StoresConfig("none", "none")
ON_DEVICE = ModelConfig(device="cuda:0", dtype="float32")
ON_CPU = ModelConfig(device="cpu", dtype="float32")
Answers = dict[str, Any]


def families(*names: str) -> Answers:
    """Answer with every sampling setting, with several drafters and heads, in a batch, and in a second turn."""
    expected = {name: answers_on_cpu(model_of(name)) for name in names}
    install()
    found = {name: answers_on_device(model_of(name), expected[name]) for name in names}
    return {"expected": expected, "found": found}


def answers_on_cpu(model: PreTrainedModel) -> Answers:
    longer = second_prompt(plain(model, GREEDY))
    return {
        **{name: plain(model, sampling) for name, sampling in SAMPLINGS.items()},
        **{f"slot {length}": plain(model, GREEDY, prompt_of(length)) for length in LENGTHS},
        "second turn": plain(model, GREEDY, longer),
    }


def second_prompt(answer: list[int]) -> list[int]:
    return PROMPT + answer + prompt_of(9)


def answers_on_device(model: PreTrainedModel, expected: Answers) -> Answers:
    """Return the answers with each drafter, which must not depend on the drafts."""
    DEVICE.counts.clear()
    target = Target(on_device(model))
    was_captured = target.captures
    found = {}
    for name, drafter in drafters(target, expected["greedy"]):
        answered = {
            key: output_tokens(run(target, PROMPT, SAMPLINGS[key], MAX_NEW_TOKENS, drafter=drafter))
            for key in reversed(SAMPLINGS if name in ("none", "hd") else FEW_SAMPLINGS)
        }
        second = run(target, second_prompt(answered["greedy"]), GREEDY, MAX_NEW_TOKENS, drafter=drafter)
        # With heads, passes return hidden states from then on.
        batch = batched(target, drafts=name == "hd") if name in ("none", "hd", "heads of amphista") else {}
        found[name] = {**answered, **batch, "second turn": output_tokens(second)}
        assert second[0].cached_tokens > 0 or not target.facts.continues
    return {"answers": found, "captures": was_captured and target.captures, "faults": list(DEVICE.counts.faults)}


def drafters(target: Target, truth: list[int]) -> Iterator[tuple[str, Drafter | None]]:
    """Yield drafters by name. Heads come last, because they make the target record hidden states from then on."""
    yield "none", None
    yield "lying drafter", wrong_drafter(truth)
    yield "hd", hierarchy()
    for kind in ("amphista", "hydra++", "mtp"):
        saved = random_for(target, HeadsConfig(kind, rank=8).resolved)
        yield f"heads of {kind}", StandaloneDrafter(drafter_of(saved, target), FixedBudget(24))


def batched(target: Target, *, drafts: bool) -> Answers:
    """Answer several prompts in fewer slots."""
    answers: Answers = defaultdict(list)
    prompts = {f"slot {length}": prompt_of(length) for length in LENGTHS}
    requests = (
        Request(slot, prompt, Sampler(GREEDY, prompt), hierarchy() if drafts else NoDraft())
        for slot, prompt in prompts.items()
    )
    for request, step in decode_batch(target, partial(next, requests, None), SLOTS, max_new_tokens=MAX_NEW_TOKENS):
        answers[request.key] += step.tokens
    return dict(answers)


def bfloat16(*names: str) -> Answers:
    """Return how much the logits prefer the CPU's token where the device chooses another one in bfloat16.

    In this precision, near ties depend on the shape of a matmul.
    """
    models = {name: model_of(name, torch.bfloat16) for name in names}
    expected = {name: plain(model, GREEDY) for name, model in models.items()}
    install()
    found = {}
    for name, model in models.items():
        target = Target(on_device(model))
        ways = None, wrong_drafter(expected[name]), hierarchy()
        answers = [output_tokens(run(target, PROMPT, GREEDY, MAX_NEW_TOKENS, drafter=drafter)) for drafter in ways]
        gaps = [gap_at_difference(model, expected[name], answer) for answer in answers]
        found[name] = {"gaps": gaps, "captures": target.captures}
    return found


def gap_at_difference(model: PreTrainedModel, expected: list[int], found: list[int]) -> float:
    """Return the gap between the logits of the first tokens that differ, in standard deviations of the logits there."""
    for place, (token, other) in enumerate(zip(expected, found, strict=True)):
        if token != other:
            logits = plain_logits(model, PROMPT + expected[:place]).float()
            return float((logits[token] - logits[other]).abs() / logits.std())
    return 0.0


def grammars() -> Answers:
    """Answer with a JSON schema by the toy model, greedy and sampled, one by one and in a batch."""

    def answered(model: ModelConfig, method: str, temperature: float, batch: int) -> list[str]:
        decoding = DecodeConfig(method, 60, draft_tokens=12 if method == "hd" else None, batch_size=batch)
        answerer = Answerer(model, decoding, SamplingConfig(temperature=temperature, seed=3), store_set=NO_STORES)
        asked = {"role": "user", "content": "Tom has 3 boxes with 12 pencils each. Answer in JSON."}
        prompts = [Prompt((asked,), grammar=Grammar.json_schema(JSON_SCHEMAS[schema])) for schema in SCHEMAS]
        return ["".join(answer) for answer in answerer.all_answers(prompts)]

    temperatures = 0.0, 0.7
    expected = [answered(ON_CPU, "ar", temperature, 1) for temperature in temperatures]
    install()
    found = {
        f"{method}, {batch}": [answered(ON_DEVICE, method, temperature, batch) for temperature in temperatures]
        for method in ("ar", "hd")
        for batch in (1, 2)
    }
    return {"expected": expected, "found": found} | diagnostics()


def methods() -> Answers:
    """Answer with every method that needs no stores or heads, also up to a full context, and with ``generate``."""
    model = model_of("llama")

    def answered(target: Target, drafter: Drafter | None) -> Answers:
        prompts = {"greedy": (PROMPT, GREEDY), "sampled": (PROMPT, SAMPLED), "full context": (NEARLY_FULL, GREEDY)}
        return {
            name: output_tokens(run(target, prompt, sampling, 2 * MAX_NEW_TOKENS, drafter=drafter))
            for name, (prompt, sampling) in prompts.items()
        }

    expected = answered(Target(model), None)
    install()
    moved = on_device(model)
    target, generator = Target(moved), Generator(wrong_drafter(expected["greedy"]))
    found = {method: answered(target, drafter_for(DecodeConfig(method), target, StoreSet())) for method in METHODS}
    found["generate"] = {**expected, "greedy": generated(moved, PROMPT, 2 * MAX_NEW_TOKENS, custom_generate=generator)}
    return {"expected": expected, "found": found, "captures": target.captures} | diagnostics()


if __name__ == "__main__":
    main({group.__name__: group for group in (families, bfloat16, grammars, methods)}, sys.argv[1:])
