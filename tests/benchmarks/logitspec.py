"""Measures what drafting from logits brings on the embedded model and its held-out prompts.

    python -m tests.benchmarks.logitspec coverage    # coverage of the token after next, with a plot
    python -m tests.benchmarks.logitspec steps       # tokens per step, by kind and length of the prompt
    python -m tests.benchmarks.logitspec time        # time per step besides the forward pass
    python -m tests.benchmarks.logitspec pays        # plain, fixed and measured budgets where little can be drafted

The last two need an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.config import (
    LARGEST_BUDGET,
    SOURCE_LETTERS,
    DecodeConfig,
    ModelConfig,
    SamplingConfig,
    StoresConfig,
)
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.core.sequence import Step
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.logitspec import LogitSpec
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load

TOPS = (1, 2, 4, 8, 16, 32, 60)
NEVER = 10**9
"""Rank of a token without a ranking."""
LENGTHS = (30, 60)
"""Prompts are grouped into those below, between and above these numbers of tokens."""

Ids = list[int]
Ranks = list[int]


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


def coverage(bench: Bench, plot: Path) -> None:
    """Print how often the top-k of the last logits, and of logits copied from earlier, hold the token after next."""
    ranks: dict[str, Ranks] = defaultdict(list)
    drafter = bench.drafter("hd")
    everywhere: dict[int, np.ndarray] = {}
    for prompt in bench.prompts:
        said = [token for step in bench.answer(prompt, drafter) for token in step.tokens]
        for name, found in ranks_of(bench, prompt, said, everywhere).items():
            ranks[name] += found
    shares = {name: [float(np.mean(np.array(found) < top)) for top in TOPS] for name, found in ranks.items()}
    print(f"{len(ranks['last logit']):,} tokens\n\n| top | " + " | ".join(map(str, TOPS)) + " |")
    print("|---" * (len(TOPS) + 1) + "|")
    for name, of in shares.items():
        print(f"| {name} | " + " | ".join(f"{share:.1%}" for share in of) + " |")
    draw(shares, plot)


def ranks_of(bench: Bench, prompt: Ids, said: Ids, everywhere: dict[int, np.ndarray]) -> dict[str, Ranks]:
    """Return the rank of each answer token but the first in the last logits and in copied logits; 0 is the best."""
    ids = [*prompt, *said]
    with torch.inference_mode():
        rows = bench.loaded.target.model(torch.tensor([ids])).logits[0].float().numpy()
    here: dict[int, np.ndarray] = {}
    ranks: dict[str, Ranks] = defaultdict(list)
    for at, (root, truth) in enumerate(pairwise(ids)):
        if at < len(prompt):
            continue
        last = rows[at - 1]
        ranks["last logit"].append(rank(last, truth) - int(last[root] > last[truth]))
        for name, known in (("copied logits, this conversation", here), ("copied logits, all of the run", everywhere)):
            ranks[name].append(rank(known[root], truth) if root in known else NEVER)
            known[root] = rows[at]
    return ranks


def rank(row: np.ndarray, token: int) -> int:
    return int((row > row[token]).sum())


def draw(shares: Mapping[str, Sequence[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for name, of in shares.items():
        axis.plot(TOPS, [100 * share for share in of], "o-", label=name)
    axis.set(xscale="log", xlabel="candidates", ylabel="hold the token after next, %", ylim=(0, 100))
    axis.set_xticks(TOPS, [str(top) for top in TOPS])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


class Counted:
    """Wraps a drafter to count drafts, and those in which a lookup found something."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.drafts = self.found = 0

    @property
    def seconds(self) -> Mapping[SourceId, float]:
        return self.drafter.seconds

    def begin(self, prompt: Sequence[int]) -> None:
        self.drafter.begin(prompt)

    def draft(self, context: Sequence[int]) -> DraftTree:
        tree = self.drafter.draft(context)
        self.drafts += 1
        # A bare candidate at the root comes from the logits alone; all other nodes come from a lookup.
        bare = isinstance(self.drafter, LogitSpec) and (tree.sources == SourceId.LAST) & (tree.parents == -1)
        self.found += bool(np.any(~np.broadcast_to(bare, len(tree))))
        return tree

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        self.drafter.observe(accepted, verified)


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


class Timed(Counted):
    """Wraps a drafter to record its time per step, from the logits of one pass to the tree of the next."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.taken: list[float] = []

    def draft(self, context: Sequence[int]) -> DraftTree:
        started = time.perf_counter()
        tree = self.drafter.draft(context)
        self.taken[-1] += time.perf_counter() - started
        return tree

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        started = time.perf_counter()
        self.drafter.observe(accepted, verified)
        self.taken.append(time.perf_counter() - started)


def times(bench: Bench, budgets: Sequence[int]) -> None:
    """Print the drafting times of all contenders, which take turns at each prompt so that slow phases affect all."""
    names = [(name, method, options) for name, method, options in settings(budgets) if "alone" not in name]
    timed = {name: Timed(bench.drafter(method, **options)) for name, method, options in names}
    for prompt in bench.prompts:
        for drafter in timed.values():
            bench.answer(prompt, drafter)
    print("| µs a step, drafting and observing | median | mean | p90 | median above hd |\n|---|---|---|---|---|")
    base = 0.0
    for name, drafter in timed.items():
        found = np.array(drafter.taken) * 1e6
        median = float(np.median(found))
        base = median if name.startswith("hd,") else base
        above = f"{median - base:.0f}" if name.startswith("hd+") else ""
        print(f"| {name} | {median:.0f} | {found.mean():.0f} | {np.quantile(found, 0.9):.0f} | {above} |")


def pays(bench: Bench, temperature: float, rounds: int) -> None:
    """Compare the speed of whole answers; the median over rounds counts for each prompt."""
    made = {
        "plain": bench.drafter("ar"),
        "hd+logitspec, 64 nodes": bench.drafter("hd+logitspec", draft_tokens=LARGEST_BUDGET),
        "hd+logitspec, as many as pay": bench.drafter("hd+logitspec"),
        "hd, as many as pay": bench.drafter("hd"),
    }
    taken: dict[str, list[float]] = {name: [] for name in made}
    tokens = dict.fromkeys(made, 0)
    passes = dict.fromkeys(made, 0)
    for number, prompt in enumerate(bench.prompts):
        sampling = SamplingConfig(temperature=temperature, seed=number, top_k=0 if temperature else None)
        for name, drafter in made.items():
            seconds = []
            for _ in range(rounds):
                started = time.perf_counter()
                steps = bench.answer(prompt, drafter, sampling)
                seconds.append(time.perf_counter() - started)
            taken[name].append(statistics.median(seconds))
            tokens[name] += sum(len(step.tokens) for step in steps)
            passes[name] += len(steps)
    print(f"temperature {temperature:g}\n\n| | tokens per step | tokens/s | against plain |\n|---|---|---|---|")
    plain = tokens["plain"] / sum(taken["plain"])
    for name, of in taken.items():
        speed = tokens[name] / sum(of)
        print(f"| {name} | {tokens[name] / passes[name]:.3f} | {speed:.0f} | {speed / plain:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("coverage", "steps", "time", "pays"))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--budgets", type=int, nargs="+", default=[32, LARGEST_BUDGET])
    parser.add_argument("--methods", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path, default=Path("logit-coverage.png"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(options.prompts, options.tokens)
    print(f"{machine()}; {options.prompts} prompts, up to {options.tokens} tokens each, one thread\n")
    if options.part == "coverage":
        coverage(bench, options.plot)
    elif options.part == "steps":
        sampling = SamplingConfig(temperature=options.temperature, top_k=0 if options.temperature else None)
        steps(bench, sampling, options.budgets, options.methods)
    elif options.part == "time":
        times(bench, options.budgets)
    else:
        pays(bench, options.temperature, options.rounds)


if __name__ == "__main__":
    main()
