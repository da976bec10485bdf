"""Measures predicted outputs on the demo model: useless, misleading, half right and exact ones against none.

    python -m tests.benchmarks.prediction [--prompts 24] [--rounds 5] [--draft-tokens 32]

All kinds answer each prompt in turn, each with a separate drafter and the demo's stores. Times of a step and of an
answer are medians of the ratios to the same answer without a prediction.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from itertools import chain

import torch

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.config.budgets import FIXED_BUDGET
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.sequence import Stats
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load

NONE, FOREIGN, SHUFFLED, HALF, EXACT = "none", "useless", "misleading", "half right", "exact"
KINDS = (NONE, FOREIGN, SHUFFLED, HALF, EXACT)
RUN = 8
"""Length of alternating right and wrong runs in a half right prediction, in tokens."""
PIECE = 3
"""Length of right runs in a misleading prediction, in tokens: after two that match, only one more is right."""

Ids = list[int]


def predictions(answers: Sequence[Ids], number: int) -> dict[str, Ids]:
    """Return the predictions for the answer to a prompt, by kind."""
    true, other = answers[number], answers[(number + 1) % len(answers)]
    filled = (other * (len(true) // len(other) + 1))[: len(true)]
    half = [(filled if at // RUN % 2 else true)[at] for at in range(len(true))]
    pieces = [true[at : at + PIECE] for at in range(0, len(true), PIECE)]
    # Reordered pieces often match the context but continue wrongly.
    return {
        NONE: [],
        FOREIGN: other,
        SHUFFLED: [*chain.from_iterable(pieces[1::2] + pieces[::2])],
        HALF: half,
        EXACT: true,
    }


def answer(loaded: Loaded, prompt: Ids, drafter: Drafter, max_new_tokens: int, prediction: Ids) -> tuple[Stats, Ids]:
    sampler, stops = sampler_for(loaded, SamplingConfig(), prompt, max_new_tokens=max_new_tokens)
    stats, said = Stats(), []
    for step in decode(
        loaded.target,
        prompt,
        sampler,
        max_new_tokens=max_new_tokens,
        stops=stops,
        drafter=drafter,
        prediction=prediction,
    ):
        stats.add(step)
        said += step.tokens
    return stats, said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, at most")
    parser.add_argument("--draft-tokens", type=int, default=FIXED_BUDGET)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(ModelConfig(device="cpu", dtype="float32"))
    stores = StoreSet.for_tokenizer(loaded.tokenizer, StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX)))
    config = DecodeConfig(draft_tokens=options.draft_tokens)
    asked = list(read_prompts(demo.PROMPTS))[: options.prompts]
    prompts = [encode_conversation(loaded.tokenizer, prompt.messages) for prompt in asked]
    answers = [answer(loaded, prompt, NoDraft(), options.tokens, [])[1] for prompt in prompts]
    found: dict[str, list[Stats]] = {kind: [] for kind in KINDS}
    for round_ in range(options.rounds):
        # New drafters in each round, because they remember earlier answers.
        drafters = {kind: drafter_for(config, loaded.target, stores) for kind in KINDS}
        for number, prompt in enumerate(prompts):
            turn = (number + round_) % len(KINDS)
            for kind in (*KINDS[turn:], *KINDS[:turn]):
                stats, said = answer(loaded, prompt, drafters[kind], options.tokens, predictions(answers, number)[kind])
                assert said == answers[number]
                found[kind].append(stats)
    print(f"{machine()}; {len(prompts)} prompts, {sum(map(len, answers)):,} tokens, {options.rounds} rounds\n")
    print("| prediction | tokens per step | accepted | rejected | µs a step around the model | a step | an answer |")
    print("|---" * 7 + "|")
    for kind, of in found.items():
        total = Stats.total(of)
        pairs = list(zip(of, found[NONE], strict=True))
        step = statistics.median(one.seconds / one.steps / (none.seconds / none.steps) for one, none in pairs)
        whole = statistics.median(one.seconds / none.seconds for one, none in pairs)
        print(
            f"| {kind} | {total.tokens_per_step:.2f} | {total.accepted_prediction_tokens // options.rounds:,} | "
            f"{total.rejected_prediction_tokens // options.rounds:,} | "
            f"{statistics.median(one.outside_us_per_step for one in of):.0f} | {step - 1:+.1%} | {whole - 1:+.1%} |"
        )


if __name__ == "__main__":
    main()
