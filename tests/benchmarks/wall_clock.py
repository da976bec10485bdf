"""Whole answers against ``model.generate`` on the embedded model: ``python -m tests.benchmarks.wall_clock``.

All methods answer every held-out prompt in turn, in one process, on the CPU, to the end of the answer or
160 tokens. A time is that of a whole answer; of several rounds the median counts for each answer, and the
first prompts of all kinds are asked once before, as a warm-up. hdtool uses its embedded stores, which
hold nothing of the held-out prompts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.answers import Answerer
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.stats import Stats
from hdtool.runtime.surroundings import machine
from tests.oracle import generated

MOST = 160
Answer = Callable[[Prompt, list[int]], list[int]]
Times = dict[tuple[str, str], list[float]]
"""Seconds of each answer, by contender and prompt."""


def hdtool(method: str, sampling: SamplingConfig, stats: dict[str, Stats]) -> Answer:
    answerer = Answerer(ModelConfig(device="cpu"), DecodeConfig(method, MOST), sampling)

    def answer(prompt: Prompt, ids: list[int]) -> list[int]:
        (made,) = answerer.answers(prompt)
        for _ in made:
            pass
        stats[method] = Stats.total([stats.get(method, Stats()), made.stats])
        return made.output_ids

    return answer


def generate(temperature: float, **options: Any) -> Answer:
    model = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32)
    if temperature:
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0}
    return lambda prompt, ids: generated(model, ids, MOST, **options)


def contenders(methods: list[str], temperature: float, stats: dict[str, Stats]) -> dict[str, Answer]:
    sampling = SamplingConfig(temperature=temperature, top_k=0 if temperature else None)
    peers = {"generate": generate(temperature)}
    if not temperature:
        peers["generate, prompt lookup"] = generate(temperature, prompt_lookup_num_tokens=10)
    return peers | {method: hdtool(method, sampling, stats) for method in methods}


def measure(prompts: list[Prompt], answers: dict[str, Answer], rounds: int) -> tuple[Times, dict[tuple[str, str], int]]:
    """Seconds of every answer, and its tokens."""
    tokenizer = Answerer(ModelConfig(device="cpu"), DecodeConfig("ar"), SamplingConfig()).loaded.tokenizer
    asked = [(prompt, encode_conversation(tokenizer, prompt.messages)) for prompt in prompts]
    times: Times = defaultdict(list)
    tokens: dict[tuple[str, str], int] = {}
    for turn in range(rounds + 1):
        for prompt, ids in asked if turn else asked[:8]:
            for name, answer in answers.items():
                started = time.perf_counter()
                said = answer(prompt, ids)
                if turn:
                    times[name, prompt.id].append(time.perf_counter() - started)
                    tokens[name, prompt.id] = len(said)
    return times, tokens


def table(prompts: list[Prompt], names: list[str], times: Times, tokens: dict[tuple[str, str], int]) -> None:
    """Tokens per second of each contender, for each kind of prompt, and against the first."""
    kinds = list(dict.fromkeys(prompt.category for prompt in prompts))
    print("| tokens/s | " + " | ".join([*kinds, "all", f"against {names[0]}"]) + " |")
    print("|---" * (len(kinds) + 3) + "|")

    def speed(name: str, kind: str | None) -> float:
        chosen = [(name, prompt.id) for prompt in prompts if kind in (None, prompt.category)]
        return sum(tokens[key] for key in chosen) / sum(statistics.median(times[key]) for key in chosen)

    for name in names:
        cells = [f"{speed(name, kind):.0f}" for kind in (*kinds, None)]
        print(f"| {name} | " + " | ".join([*cells, f"{speed(name, None) / speed(names[0], None):.2f}"]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["ar", "pld", "rest", "hd-paper", "hd"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    prompts = list(read_prompts(demo.PROMPTS))[: options.prompts]
    stats: dict[str, Stats] = {}
    answers = contenders(options.methods, options.temperature, stats)
    times, tokens = measure(prompts, answers, options.rounds)
    print(f"{machine()}; {options.threads} threads, temperature {options.temperature:g}, {len(prompts)} prompts\n")
    table(prompts, list(answers), times, tokens)
    print("\n| method | tokens per step | drafting, µs a step | in the model, ms | around it, µs |")
    print("|---|---|---|---|---|")
    for method, found in stats.items():
        print(
            f"| {method} | {found.tokens_per_step:.2f} | {found.draft_us_per_step:.0f} "
            f"| {found.verify_ms_per_step:.2f} | {found.outside_us_per_step:.0f} |"
        )


if __name__ == "__main__":
    main()
