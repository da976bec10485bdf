"""Long scenarios on a simulated CUDA device: families with every sampling setting, bfloat16, grammars and methods.

``python -m tests.support.device_long_scenarios GROUP,... [ARGUMENT ...]``
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from hdtool.data.prompts import Grammar, Prompt
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.conformance import CHECKS, FURTHER_CHECKS, OF_BITS
from tests.support.decoding import answer_of
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
from tests.support.engines import Engine
from tests.support.families import model_of
from tests.support.json_schemas import JSON_SCHEMAS
from tests.support.oracle import generated, plain_logits, prompt_of
from tests.support.simulated_cuda.install import install, on_device
from tests.support.simulated_cuda.queue import DEVICE

SCHEMAS = "sentiment", "tool choice"
NEARLY_FULL = prompt_of(480)
"""Prompt that leaves less room in the models' context than an answer needs."""
METHODS = "ar", "pld", "lade", "sam", "suffix", "hd-paper", "hd", "logitspec", "tr", "racer", "hd+logitspec"
NO_STORES = StoresConfig("none", "none")
ON_DEVICE = ModelConfig(device="cuda:0", dtype="float32")
ON_CPU = ModelConfig(device="cpu", dtype="float32")
Answers = dict[str, Any]


def families(*names: str) -> Answers:
    """Check that families have the CPU's logits and answers on the device, with the checks of ``conformance``."""
    install()
    found = {}
    for name in names:
        DEVICE.counts.clear()
        engine = Engine(Target(on_device(model_of(name))), model_of(name))
        for check in (*CHECKS, *FURTHER_CHECKS):
            if check not in OF_BITS:
                check(engine)
        found[name] = {"captures": engine.target.captures, "faults": list(DEVICE.counts.faults)}
    return found


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
        answers = [answer_of(target, PROMPT, GREEDY, MAX_NEW_TOKENS, drafter=drafter) for drafter in ways]
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
        answerer = Answerer(model, decoding, SamplingConfig(temperature=temperature, seed=3), stores=NO_STORES)
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
            name: answer_of(target, prompt, sampling, 2 * MAX_NEW_TOKENS, drafter=drafter)
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
