"""Compares plain decoding, ``hd``, and ``hd`` with drafts from the grammar on structured output.

    python -m tests.benchmarks.structured MODEL [--schemas 30] [--max-new-tokens 160] [--temperature 0.8] [--rounds 1]
        [--demo-stores]

All three decode under the grammar's mask. They answer each of 30 schemas in turn, with a fresh drafter per answer
(cold). ``--demo-stores`` drafts from the stores that the demo builds for SmolLM2, made of the model's answers to
everyday questions and of code and text; otherwise there are no stores. Answers are compared with plain decoding and
validated. Forced tokens are those whose bytes the grammar dictates given the tokens before; they count as drafted if
they were accepted from a draft tree.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hdtool.builders.demo.stores import stores_of_real_model
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import Grammar
from hdtool.runtime.answerer import decode
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.sequence import Finish
from hdtool.runtime.core.tree import LARGEST_TREE
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.generation.grammar import GrammarCompiler, GrammarProcessor, guided_drafter
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.samplers import compiler_for, sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from tests.support.json_schemas import JSON_SCHEMAS

PLAIN, MASKED, GUIDED = "ar", "hd, masked", "hd, guided"
MODES = (PLAIN, MASKED, GUIDED)


@dataclass
class Measured:
    """Totals over the answers of one way."""

    speeds: list[float] = field(default_factory=list)
    """Tokens per second of each answer, prefill included."""
    decoding: list[float] = field(default_factory=list)
    """Tokens per second of each answer after the prefill."""
    tokens: int = 0
    steps: int = 0
    identical: int = 0
    valid: int = 0
    complete: int = 0
    forced: int = 0
    accepted: int = 0
    """Forced tokens that were drafted and accepted."""


def question(name: str, schema: dict[str, Any]) -> str:
    return f"Write an example of the following as JSON: {name}. Use this JSON schema: {json.dumps(schema)}"


def forced_positions(compiler: GrammarCompiler, grammar: Grammar, answer: Sequence[int]) -> list[bool]:
    """Return a flag per token: True if its bytes are dictated by the grammar."""
    guide = compiler.guide(grammar)
    found = []
    for token in answer:
        dictated = guide._matcher.compute_ff_bytes()
        text = compiler.bytes_of(token)
        found.append(bool(text) and dictated.startswith(text))
        guide.extend([token])
    return found


def answer(
    loaded: Loaded, compiler: GrammarCompiler, grammar: Grammar, asked: list[int], mode: str, options: Any
) -> tuple[list[int], list[bool], tuple[float, float], int, Finish | None]:
    """Answer a prompt; return the tokens, a drafted flag per token, the seconds, the steps and the finish reason.

    The seconds are those of the whole answer and those after the prefill.
    """
    decoding = DecodeConfig("ar" if mode == PLAIN else "hd", options.max_new_tokens)
    stores = StoreSet.for_tokenizer(loaded.tokenizer, options.stores, decoding.databases)
    drafter: Drafter = drafter_for(decoding, loaded.target, stores)
    guide = compiler.guide(grammar)
    if mode == GUIDED:
        drafter = guided_drafter(drafter, guide, LARGEST_TREE)
    sampling = SamplingConfig(temperature=options.temperature, seed=1)
    sampler, stops = sampler_for(
        loaded, sampling, asked, max_new_tokens=options.max_new_tokens, first=[GrammarProcessor(guide)]
    )
    tokens: list[int] = []
    drafted: list[bool] = []
    steps, finish = 0, None
    started = time.perf_counter()
    for step in decode(
        loaded.target,
        asked,
        sampler,
        max_new_tokens=options.max_new_tokens,
        stops=stops,
        drafter=drafter,
        prefix_caching=False,
    ):
        tokens += step.tokens
        drafted += [True] * len(step.path) + [False] * (len(step.tokens) - len(step.path))
        steps, finish = steps + 1, step.finish
        if steps == 1:
            prompt_read = time.perf_counter()
    ended = time.perf_counter()
    return tokens, drafted, (ended - started, ended - prompt_read), steps, finish


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--schemas", type=int, default=len(JSON_SCHEMAS))
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--demo-stores", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    loading = ModelConfig(options.model, device="cpu", activations=options.activations)
    loaded = load(loading)
    options.stores = stores_of_real_model(loading) if options.demo_stores else StoresConfig("none", "none")
    compiler = compiler_for(loaded)
    measured = {mode: Measured() for mode in MODES}
    warm = Grammar.regex("[a-z]{8}")
    for mode in MODES:  # warm-up: compiles, and measures passes
        answer(loaded, compiler, warm, encode_conversation(loaded.tokenizer, [{"role": "user", "content": "Hi"}]), mode,
               options)  # fmt: skip
    for _ in range(options.rounds):
        for name, schema in list(JSON_SCHEMAS.items())[: options.schemas]:
            grammar = Grammar.json_schema(schema)
            asked = encode_conversation(loaded.tokenizer, [{"role": "user", "content": question(name, schema)}])
            expected: list[int] = []
            for mode in MODES:
                tokens, drafted, seconds, steps, finish = answer(loaded, compiler, grammar, asked, mode, options)
                expected = expected or tokens
                one = measured[mode]
                one.speeds.append(len(tokens) / seconds[0])
                one.decoding.append((len(tokens) - 1) / seconds[1])
                one.tokens, one.steps = one.tokens + len(tokens), one.steps + steps
                one.identical += tokens == expected
                one.complete += finish is Finish.STOP
                one.valid += finish is Finish.STOP and is_json(
                    str(loaded.tokenizer.decode(tokens, skip_special_tokens=True))
                )
                places = forced_positions(compiler, grammar, tokens)
                one.forced += sum(places)
                one.accepted += sum(dictated and known for dictated, known in zip(places, drafted, strict=True))
    report(measured)
    print(f"{options.model}, temperature {options.temperature}, one thread, {machine(loaded.target.device)}")


def report(measured: dict[str, Measured]) -> None:
    plain, masked = measured[PLAIN], measured[MASKED]
    for mode, one in measured.items():
        print(
            f"{mode:<11} {statistics.median(one.speeds):6.1f} tokens/s, "
            f"{_ratio(one.speeds, plain.speeds)} times plain, {_ratio(one.speeds, masked.speeds)} times masked; "
            f"after the prompt {statistics.median(one.decoding):.1f} "
            f"tokens/s, {_ratio(one.decoding, plain.decoding)} and {_ratio(one.decoding, masked.decoding)} times; "
            f"{one.tokens / one.steps:.2f} tokens per step; "
            f"{one.identical}/{len(plain.speeds)} identical, {one.valid}/{one.complete} complete answers valid; "
            f"{one.forced} of {one.tokens} tokens forced, "
            f"{100 * one.accepted / max(1, one.forced):.1f} % of them drafted"
        )


def _ratio(speeds: list[float], others: list[float]) -> str:
    """Return the median ratio of speeds, answer by answer."""
    return f"{statistics.median(speed / other for speed, other in zip(speeds, others, strict=True)):.2f}"


if __name__ == "__main__":
    main()
