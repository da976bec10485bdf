"""Measures tokens per step of several samples of one prompt in a batch, with and without a shared history.

python -m tests.benchmarks.siblings [--samples 16] [--prompts 8] [--temperature 1.0]
"""

from __future__ import annotations

import argparse

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import interleave_categories, read_prompts
from hdtool.runtime.answerer import decode_batch
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.config import ModelConfig, SamplingConfig, StoresConfig
from hdtool.runtime.core.loop import Request
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load

MAX_NEW_TOKENS, NODES = 128, 16


def answers(
    loaded: Loaded, stores: StoreSet, ids: list[int], samples: int, temperature: float, *, shared: bool
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """Return the tokens and the number of steps of each sample."""
    history = History() if shared else None
    requests = []
    for seed in range(samples):
        sampling = SamplingConfig(temperature=temperature, seed=seed)
        sampler, stops = sampler_for(loaded, sampling, ids, max_new_tokens=MAX_NEW_TOKENS)
        drafter = Hierarchy(stores.model, stores.corpus, budget=FixedBudget(NODES), history=history)
        requests.append(Request(seed, ids, sampler, drafter, stops))
    tokens: dict[int, list[int]] = {seed: [] for seed in range(samples)}
    steps = dict.fromkeys(range(samples), 0)
    waiting = iter(requests)
    for request, step in decode_batch(
        loaded.target, lambda: next(waiting, None), samples, max_new_tokens=MAX_NEW_TOKENS
    ):
        tokens[request.key] += step.tokens
        steps[request.key] += 1
    return tokens, steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    given = parser.parse_args()
    loaded = load(ModelConfig())
    asked = interleave_categories(read_prompts(demo.PROMPTS), given.prompts)
    for name, stores in (
        ("without stores", StoreSet()),
        ("with the demo's stores", StoreSet.for_tokenizer(loaded.tokenizer, StoresConfig())),
    ):
        sums = {False: [0, 0], True: [0, 0]}
        for prompt in asked:
            ids = encode_conversation(loaded.tokenizer, list(prompt.messages))
            said = {}
            for shared in (False, True):
                tokens, steps = answers(loaded, stores, ids, given.samples, given.temperature, shared=shared)
                said[shared] = tokens
                for seed in range(1, given.samples):
                    sums[shared][0] += len(tokens[seed])
                    sums[shared][1] += steps[seed]
            assert said[False] == said[True], "sharing changed an answer"
        alone, together = (sums[shared][0] / sums[shared][1] for shared in (False, True))
        print(f"{name}: {alone:.3f} tokens per step alone, {together:.3f} shared, {together / alone - 1:+.1%}")


if __name__ == "__main__":
    main()
