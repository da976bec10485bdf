"""Compares every method with plain decoding, answer by answer: ``python -m tests.benchmarks.exactness``.

The embedded model answers its held-out prompts with its embedded stores, under each sampling configuration: first by
plain decoding, then by each method. Greedy plain decoding is also compared with ``model.generate``. Exits with an error
if a method's answer differs from plain decoding, or a greedy plain answer from that of ``model.generate``.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.config.decoding import METHODS, DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from tests.support.oracle import generated

SAMPLINGS = {
    "greedy": [SamplingConfig()],
    "greedy, penalty 1.2": [SamplingConfig(repetition_penalty=1.2)],
    "T 0.7": [SamplingConfig(temperature=0.7, seed=seed) for seed in range(3)],
    "T 1.0": [SamplingConfig(temperature=1.0, seed=seed) for seed in range(3)],
    "T 1.0, top-p 0.9, penalty 1.2": [
        SamplingConfig(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=seed) for seed in range(3)
    ],
}
"""Sampling configurations by name; the prompts are distributed over the seeds of each."""

Ids = list[int]


def answer(
    loaded: Loaded, ids: Ids, sampling: SamplingConfig, max_new_tokens: int, drafter: Drafter
) -> tuple[Ids, int]:
    sampler, stops = sampler_for(loaded, sampling, ids, max_new_tokens=max_new_tokens)
    steps = list(decode(loaded.target, ids, sampler, max_new_tokens=max_new_tokens, stops=stops, drafter=drafter))
    return [token for step in steps for token in step.tokens], len(steps)


def drafters(loaded: Loaded, names: list[str]) -> dict[str, Drafter]:
    """Return one drafter per method.

    A drafter serves all answers of one sampling configuration only, so that its history never holds an answer to the
    same prompt.
    """
    store_set = StoreSet.for_tokenizer(loaded.tokenizer, StoresConfig())
    return {name: drafter_for(DecodeConfig(name), loaded.target, store_set) for name in names}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=[name for name in METHODS if name != "ar"])
    parser.add_argument("--samplings", nargs="+", default=list(SAMPLINGS), choices=SAMPLINGS)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(ModelConfig(device="cpu", dtype="float32"))
    prompts = [encode_conversation(loaded.tokenizer, prompt.messages) for prompt in read_prompts(demo.PROMPTS)]
    prompts = prompts[: options.prompts]
    print(f"{machine()}; {len(prompts)} prompts, up to {options.tokens} tokens each, float32\n")
    print("| identical answers (tokens per step) | plain = generate | " + " | ".join(options.methods) + " | minutes |")
    print("|---" * (len(options.methods) + 3) + "|")
    wrong = 0
    for name in options.samplings:
        started = time.monotonic()
        methods = drafters(loaded, options.methods)
        equal, steps, tokens, library = dict.fromkeys(methods, 0), dict.fromkeys(methods, 0), 0, 0
        for number, ids in enumerate(prompts):
            sampling = SAMPLINGS[name][number % len(SAMPLINGS[name])]
            plain, _ = answer(loaded, ids, sampling, options.tokens, NoDraft())
            tokens += len(plain)
            if sampling.is_greedy:
                penalty = {"repetition_penalty": sampling.repetition_penalty} if sampling.repetition_penalty else {}
                library += generated(loaded.target.model, ids, options.tokens, **penalty) == plain
            for method, drafter in methods.items():
                drafted, taken = answer(loaded, ids, sampling, options.tokens, drafter)
                equal[method] += drafted == plain
                steps[method] += taken
                if drafted != plain:
                    print(f"{method}, {name}, prompt {number}: {plain} became {drafted}", file=sys.stderr)
        is_greedy = SAMPLINGS[name][0].is_greedy
        told = str(library) if is_greedy else "drawn otherwise"
        cells = [f"{equal[method]} ({tokens / steps[method]:.2f})" for method in methods]
        minutes = (time.monotonic() - started) / 60
        print(f"| {name} | {told} | " + " | ".join(cells) + f" | {minutes:.1f} |", flush=True)
        wrong += sum(len(prompts) - count for count in equal.values())
        wrong += len(prompts) - library if is_greedy else 0
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
