"""Measures tokens per step of sampled answers when drafters know the seed, and when they do not.

    python -m tests.benchmarks.known_draws SmolLM2.gguf --questions question.jsonl [--temperatures 0.8 1.0]

Questions alternate between the categories of the file, and each has a different seed. Each one is answered by plain
decoding and by two cold drafters, of which only one knows the seed. All answers must be equal. ``--demo-stores`` drafts
from the stores that the demo builds for SmolLM2.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import torch

from hdtool.builders.demo.stores import stores_of_real_model
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import Drafter, NoDraft, WrappedDrafter
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load

MAX_PROMPT_TOKENS = 900
SEEDS = 5000


class Unseeded(WrappedDrafter):
    """Drafter that is not told the seed."""

    def set_seed(self, seed: int | None) -> None:
        pass


def in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first prompt of each category, then the second of each, and so on."""
    by_category = defaultdict(list)
    for prompt in prompts:
        by_category[prompt.category].append(prompt)
    return [prompt for turn in zip_longest(*by_category.values()) for prompt in turn if prompt]


def tokens_and_steps(
    loaded: Loaded, drafter: Drafter, asked: list[int], sampling: SamplingConfig, max_new_tokens: int
) -> tuple[list[int], int]:
    """Return the answer and the number of its steps without the prefill."""
    sampler, stops = sampler_for(loaded, sampling, asked, max_new_tokens=max_new_tokens)
    steps = list(decode(loaded.target, asked, sampler, max_new_tokens=max_new_tokens, stops=stops, drafter=drafter))
    return [token for step in steps for token in step.tokens], len(steps) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--skip", type=int, default=0, help="questions that are left out at the start")
    parser.add_argument("--limit", type=int, default=72)
    parser.add_argument("--methods", nargs="+", default=["hd", "hd+logitspec"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.8, 1.0])
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    parser.add_argument("--demo-stores", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loading = ModelConfig(options.model, device="cpu", activations=options.activations)
    loaded = load(loading)
    named = stores_of_real_model(loading) if options.demo_stores else StoresConfig("none", "none")
    prompts = in_turn(list(read_prompts(options.questions)))[options.skip :][: options.limit]
    print(f"{machine()}\n\n| method | temperature | draft tokens | without | with | more |\n|---|---|---|---|---|---|")
    for method in options.methods:
        for temperature in options.temperatures:
            for nodes in options.draft_tokens:
                decoding = DecodeConfig(method, options.max_new_tokens, draft_tokens=nodes)
                stores = StoreSet.for_tokenizer(loaded.tokenizer, named, decoding.databases)
                tokens, steps = 0, {False: 0, True: 0}
                for number, prompt in enumerate(prompts):
                    asked = encode_conversation(loaded.tokenizer, prompt.messages[:1])
                    if len(asked) > MAX_PROMPT_TOKENS:
                        continue
                    sampling = SamplingConfig(temperature=temperature, seed=SEEDS + number)
                    plain, _ = tokens_and_steps(loaded, NoDraft(), asked, sampling, options.max_new_tokens)
                    for seeded in steps:
                        drafter = drafter_for(decoding, loaded.target, stores)
                        given = drafter if seeded else Unseeded(drafter)
                        answer, taken = tokens_and_steps(loaded, given, asked, sampling, options.max_new_tokens)
                        assert answer == plain, "drafts changed an answer"
                        steps[seeded] += taken
                    tokens += len(plain) - 1
                without, with_seed = tokens / steps[False], tokens / steps[True]
                print(
                    f"| `{method}` | {temperature} | {nodes} | {without:.3f} | {with_seed:.3f} "
                    f"| {100 * (with_seed / without - 1):.1f} % |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
