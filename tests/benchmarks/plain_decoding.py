"""Compares plain decoding with ``model.generate`` on the embedded model: ``make bench``.

Both answer the same prompts in turn, in one process, on the same device. Each uses a separately loaded model, loaded as
its users would load it. The first round is the warm-up; medians over the other rounds are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.config import ModelConfig, SamplingConfig
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Stats
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.target.load import Loaded, load
from tests.support.oracle import generated

Answer = Callable[[list[int], int], list[int]]


def ours(loaded: Loaded, stats: Stats) -> Answer:
    def answer(prompt: list[int], max_new_tokens: int) -> list[int]:
        ids: list[int] = []
        for step in decode(loaded.target, prompt, Sampler(SamplingConfig(), prompt), max_new_tokens=max_new_tokens):
            ids += step.tokens
            stats.add(step)
        return ids

    return answer


def theirs(model: Any) -> Answer:
    # Both continue past the end of the answer, so that all runs have equal length.
    model.generation_config.eos_token_id = None

    return lambda prompt, max_new_tokens: generated(model, prompt, max_new_tokens)


def multiply_as_the_library(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = torch.nn.Linear


def compare(threads: int, rounds: int, prompts: list[list[int]], max_new_tokens: int, *, torchs_products: bool) -> str:
    """Return one row of the table."""
    torch.set_num_threads(threads)
    stats = Stats()
    loaded = load(ModelConfig(device="cpu"))
    if torchs_products:
        multiply_as_the_library(loaded.target.model)
    stock = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32)
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    identical = 0
    answers = {"ours": ours(loaded, stats), "theirs": theirs(stock)}
    for turn in range(rounds + 1):
        stats.__init__()  # type: ignore[misc]
        for prompt in prompts:
            said = {}
            for name, answer in answers.items():
                started = time.perf_counter()
                said[name] = answer(prompt, max_new_tokens)
                if turn:
                    times[name].append((time.perf_counter() - started) / max_new_tokens * 1e3)
            identical += turn > 0 and said["ours"] == said["theirs"]
    mine, peer = (statistics.median(times[name]) for name in ("ours", "theirs"))
    return (
        f"| {threads} | {mine:.2f} | {peer:.2f} | {peer / mine:.2f} | {stats.verify_ms_per_step:.2f} "
        f"| {stats.outside_us_per_step:.0f} | {identical} of {rounds * len(prompts)} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--torchs-products", action="store_true", help="of few rows too, in ours as in generate")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = load(ModelConfig(device="cpu")).tokenizer
    asked = read_prompts(demo.PROMPTS)[: options.prompts]
    prompts = [encode_conversation(tokenizer, prompt.messages) for prompt in asked]
    print(f"{machine()}; {options.rounds} rounds of {len(prompts)} prompts x {options.tokens} tokens\n")
    print(
        "| threads | hdtool, ms a token | generate, ms a token | ratio | in the model, ms | around it, µs | identical |"
    )
    print("|---|---|---|---|---|---|---|")
    for threads in options.threads:
        print(
            compare(threads, options.rounds, prompts, options.tokens, torchs_products=options.torchs_products),
            flush=True,
        )


if __name__ == "__main__":
    main()
