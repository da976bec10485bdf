"""Measures tokens per step of drafting from logits, on the embedded model and its held-out prompts.

    python -m tests.benchmarks.logitspec steps [--temperature T] [--budgets 64]

Groups are the kinds of prompts and their lengths. ``found`` is the share of drafts in which a lookup found something.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.config.budgets import LARGEST_BUDGET
from hdtool.runtime.config.decoding import SOURCE_LETTERS, DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.drafter import Drafter, WrappedDrafter
from hdtool.runtime.core.sequence import Step
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.logitspec import LogitSpec
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load

LENGTHS = (30, 60)
"""Prompts are grouped into those below, between and above these numbers of tokens."""

Ids = list[int]


class Bench:
    def __init__(self, prompts: int, tokens: int) -> None:
        self.loaded: Loaded = load(ModelConfig(device="cpu", dtype="float32"))
        self.store_set = StoreSet.for_tokenizer(
            self.loaded.tokenizer, StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX))
        )
        chosen = list(read_prompts(demo.PROMPTS))[:prompts]
        self.prompts = [encode_conversation(self.loaded.tokenizer, prompt.messages) for prompt in chosen]
        self.kinds = [prompt.category or "" for prompt in chosen]
        self.tokens = tokens

    def drafter(self, method: str, **options: object) -> Drafter:
        config = DecodeConfig(method, history="none", **options)  # type: ignore[arg-type]  # prompts are repeated
        return drafter_for(config, self.loaded.target, self.store_set)

    def answer(self, prompt: Ids, drafter: Drafter, sampling: SamplingConfig | None = None) -> list[Step]:
        sampler, stops = sampler_for(self.loaded, sampling or SamplingConfig(), prompt, max_new_tokens=self.tokens)
        return list(
            decode(self.loaded.target, prompt, sampler, max_new_tokens=self.tokens, stops=stops, drafter=drafter)
        )


class Counted(WrappedDrafter):
    """Wraps a drafter to count drafts, and those in which a lookup found something."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.drafts = self.found = 0

    def draft(self, context: Sequence[int]) -> DraftTree:
        tree = super().draft(context)
        self.drafts += 1
        # A bare candidate at the root comes from the logits alone; all other nodes come from a lookup.
        bare = isinstance(self._drafter, LogitSpec) and (tree.sources == SourceId.LAST) & (tree.parents == -1)
        self.found += bool(np.any(~np.broadcast_to(bare, len(tree))))
        return tree


def settings(budgets: Sequence[int]) -> Iterator[tuple[str, str, dict[str, object]]]:
    """Yield name, method and options of each contender."""
    yield from (("pld", "pld", {}), ("logitspec", "logitspec", {}))
    for budget in budgets:
        yield f"hd, {budget} nodes", "hd", {"draft_tokens": budget}
        for letters in ("L", "R", "LR"):
            use = SOURCE_LETTERS + letters
            yield f"hd+logitspec of {use}, {budget} nodes", "hd+logitspec", {"draft_tokens": budget, "sources": use}
    for letters in ("L", "R", "LR"):
        name = f"hd+logitspec of {letters} alone, {LARGEST_BUDGET} nodes"
        yield name, "hd+logitspec", {"draft_tokens": LARGEST_BUDGET, "sources": letters}


def steps(bench: Bench, sampling: SamplingConfig, budgets: Sequence[int], only: Sequence[str]) -> None:
    groups = [*dict.fromkeys(bench.kinds), *map(length_group, (0, LENGTHS[0], LENGTHS[1])), "all"]
    counts = {group: sum(group in groups_of(bench, number) for number in range(len(bench.prompts))) for group in groups}
    print("| tokens per step | " + " | ".join(f"{group} ({counts[group]})" for group in groups) + " | found |")
    print("|---" * (len(groups) + 2) + "|")
    for name, method, options in settings(budgets):
        if only and method not in only:
            continue
        drafter = Counted(bench.drafter(method, **options))
        tokens: dict[str, int] = defaultdict(int)
        passes: dict[str, int] = defaultdict(int)
        for number, prompt in enumerate(bench.prompts):
            taken = bench.answer(prompt, drafter, sampling)
            for group in groups_of(bench, number):
                tokens[group] += sum(len(step.tokens) for step in taken)
                passes[group] += len(taken)
        cells = [f"{tokens[group] / max(1, passes[group]):.3f}" for group in groups]
        print(f"| {name} | " + " | ".join(cells) + f" | {drafter.found / drafter.drafts:.1%} |", flush=True)


def groups_of(bench: Bench, number: int) -> tuple[str, str, str]:
    return bench.kinds[number], length_group(len(bench.prompts[number])), "all"


def length_group(tokens: int) -> str:
    few, many = LENGTHS
    return f"below {few} tokens" if tokens < few else f"{few} to {many}" if tokens < many else f"{many} and more"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("steps",))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, LARGEST_BUDGET])
    parser.add_argument("--methods", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.prompts, options.tokens)
    print(f"{machine()}; {options.prompts} prompts, up to {options.tokens} tokens each, one thread\n")
    sampling = SamplingConfig(temperature=options.temperature, top_k=0 if options.temperature else None)
    steps(bench, sampling, options.budgets, options.methods)


if __name__ == "__main__":
    main()
