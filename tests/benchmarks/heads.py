"""Measures what trained heads bring on the embedded model and its held-out prompts.

    python -m tests.benchmarks.heads accuracy    # top-1 and top-5 accuracy of each head, with a plot
    python -m tests.benchmarks.heads steps       # tokens per step, by heads, number of nodes, tree and temperature
    python -m tests.benchmarks.heads speed       # speedup over plain decoding, and the share of the heads in the time
    python -m tests.benchmarks.heads passes      # the time of one pass of the heads, and of the target
    python -m tests.benchmarks.heads garbage     # heads with random weights: how much they slow down decoding

The shipped heads take part under the names of their methods, others by ``--heads NAME=FOLDER``. Speeds are ratios
within a run: contenders take turns at each answer on one thread, measured by CPU time, and the median counts.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.utils import logging

from hdtool.builders.evaluation.bench import rotated
from hdtool.builders.heads.loss import Example, FrozenTarget
from hdtool.builders.heads.train import evaluate
from hdtool.data import demo
from hdtool.runtime.config import METHODS, OPTION_METHODS, SamplingConfig
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.heads.checkpoint import kind_of, load_heads, method_of
from hdtool.runtime.drafters.trained.proposal import TrainedDrafter
from hdtool.runtime.drafters.trained_methods import drafter_of
from hdtool.runtime.kernels.machine import machine
from tests.benchmarks.logitspec import Bench
from tests.support.heads import random_for
from tests.support.one_sequence import OneSequence

BUDGETS = (22, 35, 45, 64)
TEMPERATURES = (0.0, 0.7)
ACCURACY_DRAFT_TOKENS = 32
"""Number of draft tokens for the answers on which head accuracy is measured."""

Folders = Mapping[str, Path]


class Case(NamedTuple):
    """Method with the heads it drafts from."""

    method: str
    folder: Path | None = None

    def drafter(self, bench: Bench, **options: object) -> Drafter:
        heads = (str(self.folder),) if self.folder else ()
        return bench.drafter(self.method, heads=heads, **options)


class Sums:
    """Totals over the answers of one case."""

    def __init__(self) -> None:
        self.tokens = self.steps = 0
        self.wall_clock = 0.0
        self.seconds: list[float] = []
        self.said: list[list[int]] = []

    def answer(self, bench: Bench, number: int, drafter: Drafter, sampling: SamplingConfig) -> None:
        began, started = time.perf_counter(), time.process_time()
        steps = bench.answer(bench.prompts[number], drafter, sampling)
        self.seconds.append(time.process_time() - started)
        self.wall_clock += time.perf_counter() - began
        self.said.append([token for step in steps for token in step.tokens])
        self.tokens += len(self.said[-1])
        self.steps += len(steps)

    @property
    def per_step(self) -> float:
        return self.tokens / self.steps

    def speed_of(self, plain: Sums) -> float:
        """Return the median speedup per answer over ``plain``; all answers must be equal."""
        assert self.said == plain.said, "a token has changed"
        return statistics.median(slow / fast for slow, fast in zip(plain.seconds, self.seconds, strict=True))


def accuracy(bench: Bench, folders: Folders, plot: Path) -> None:
    """Measure the accuracy of heads on the model's answers; prompt tokens do not count."""
    plain = bench.drafter("hd", draft_tokens=ACCURACY_DRAFT_TOKENS)
    lessons = []
    for prompt in bench.prompts:
        said = [token for step in bench.answer(prompt, plain) for token in step.tokens]
        lessons.append(Example(np.array(prompt + said), np.array([False] * len(prompt) + [True] * len(said))))
    found, places = {}, 0
    for name, folder in folders.items():
        heads = load_heads(folder, bench.loaded.target.model).heads
        judged = evaluate(heads, FrozenTarget(bench.loaded.target), lessons)
        found[name], places = judged.top, judged.places
    number = max(len(top["1"]) for top in found.values())
    print(f"{len(lessons)} answers, {places:,} places of the first head\n")
    names = (f"top {top}, head {head + 1}" for top in (1, 5) for head in range(number))
    print("| heads | weights | " + " | ".join(names) + " |")
    print("|---" * (2 * number + 2) + "|")
    for name, top in found.items():
        cells = [f"{share:.1%}" for best in ("1", "5") for share in top[best]]
        weights = sum(each.numel() for each in load_heads(folders[name], bench.loaded.target.model).heads.parameters())
        print(f"| {name} | {weights:,} | " + " | ".join(cells) + " |")
    draw(found, plot)


def draw(found: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3.4), layout="constrained", sharey=True)
    for axis, best in zip(axes, ("1", "5"), strict=True):
        for name, top in found.items():
            axis.plot(range(1, len(top[best]) + 1), [100 * share for share in top[best]], "o-", label=name)
        axis.set(xlabel="head", title=f"top {best}", ylim=(0, 100), xticks=range(1, 1 + len(top[best])))
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="hold the token that comes, %")
    axes[1].legend(fontsize="small")
    figure.savefig(path, dpi=110)


def steps(bench: Bench, folders: Folders, budgets: Sequence[int], temperatures: Sequence[float]) -> None:
    cases = alone(folders) | {"hd": Case("hd")} | in_hierarchy(folders)
    print("| tokens per step | tree | T | " + " | ".join(f"{budget} nodes" for budget in budgets) + " |")
    print("|---" * (len(budgets) + 3) + "|")
    plain: dict[float, list[list[int]]] = {}
    for heat, (name, case), tree in product(temperatures, cases.items(), ("dynamic", "static")):
        if tree == "static" and case.method not in OPTION_METHODS["tree"]:
            continue
        cells = []
        for budget in budgets:
            sums, drafter = Sums(), case.drafter(bench, draft_tokens=budget, tree=tree)
            for number in range(len(bench.prompts)):
                sums.answer(bench, number, drafter, SamplingConfig(temperature=heat, seed=1))
            assert plain.setdefault(heat, sums.said) == sums.said, "a token has changed"
            cells.append(f"{sums.per_step:.2f}")
        print(f"| {name} | {tree} | {heat:g} | " + " | ".join(cells) + " |", flush=True)


def alone(folders: Folders) -> dict[str, Case]:
    return {name: Case(method_of(kind_of(folder)), folder) for name, folder in folders.items()}


def in_hierarchy(folders: Folders) -> dict[str, Case]:
    cases = {f"hd+{name}": Case(f"hd+{case.method}", case.folder) for name, case in alone(folders).items()}
    return {name: case for name, case in cases.items() if case.method in METHODS}


def speed(bench: Bench, folders: Folders, temperatures: Sequence[float]) -> None:
    """Measure speedups, with as many draft nodes as pay."""
    cases = {"plain": Case("ar")} | alone(folders) | {"hd": Case("hd")} | in_hierarchy(folders)
    print("| | T | times as fast as plain | tokens per step | heads asked | a pass of theirs, µs | of the time |")
    print("|---|---|---|---|---|---|---|")
    for heat in temperatures:
        sums, drafters = raced(bench, cases, SamplingConfig(temperature=heat, seed=1))
        for name, one in sums.items():
            cells = f"{one.speed_of(sums['plain']):.2f} | {one.per_step:.2f} | {share_of_heads(drafters[name], one)}"
            print(f"| {name} | {heat:g} | {cells} |", flush=True)


def raced(
    bench: Bench, cases: Mapping[str, Case], sampling: SamplingConfig
) -> tuple[dict[str, Sums], dict[str, Drafter]]:
    """Answer all prompts by all cases in turn, after a warm-up with the first two prompts."""
    drafters = {name: case.drafter(bench) for name, case in cases.items()}
    sums = {name: Sums() for name in cases}
    for drafter in drafters.values():
        for number in (0, 1):
            Sums().answer(bench, number, drafter, sampling)
        if (session := session_of(drafter)) is not None:
            session.seconds, session.passes = 0.0, 0
    for number in range(len(bench.prompts)):
        for name in rotated(list(cases), number):
            sums[name].answer(bench, number, drafters[name], sampling)
    return sums, drafters


def share_of_heads(drafter: Drafter, sums: Sums) -> str:
    session = session_of(drafter)
    if session is None:
        return "| |"
    share = f"{session.seconds / sums.wall_clock:.1%}"
    if not session.passes:  # drafters that work token by token do not count passes
        return f"| | {share}"
    return f"{session.passes / sums.steps:.0%} | {1e6 * session.seconds / session.passes:.0f} | {share}"


def session_of(drafter: Drafter) -> Any:
    return getattr(drafter, "trained", None) or getattr(drafter, "_trained", None)


def garbage(bench: Bench, folders: Folders) -> None:
    """Compare methods using random heads with the same methods without heads."""
    with tempfile.TemporaryDirectory() as folder:
        shape = load_heads(folders["amphista"], bench.loaded.target.model).heads.config
        random_for(bench.loaded.target, shape, size=0.05).save(Path(folder))
        print("| random heads | against | times as fast, median | over all | passes of theirs | steps | of the time |")
        print("|---|---|---|---|---|---|---|")
        for without, method in (("ar", "amphista"), ("hd", "hd+amphista")):
            cases = {without: Case(without), method: Case(method, Path(folder))}
            sums, drafters = raced(bench, cases, SamplingConfig())
            one, session = sums[method], session_of(drafters[method])
            median, whole = one.speed_of(sums[without]), sum(sums[without].seconds) / sum(one.seconds)
            asked = f"{session.passes} | {one.steps:,} | {session.seconds / one.wall_clock:.1%}"
            print(f"| {method} | {without} | {median:.3f} | {whole:.3f} | {asked} |")


def passes(bench: Bench, folders: Folders) -> None:
    """Time passes after the first prompt, by CPU time."""
    target, prompt = bench.loaded.target, bench.prompts[0]
    one = OneSequence(target)
    every = {name: load_heads(folder, target.model) for name, folder in folders.items()}
    sessions = {name: drafter_of(saved, target, is_measured=False) for name, saved in every.items()}
    print("| pass | ms |\n|---|---|")
    for nodes in (0, 22, 64):
        one.prefill(prompt)
        print(f"| of the target, {nodes} nodes | {median_ms(partial(one.verify, chain(prompt[-1], nodes))):.2f} |")
    for name, session in sessions.items():
        for accepted in (1, 2, 4):
            session.begin(prompt)
            logits = one.prefill(prompt)
            session.observe(Accepted([], [int(logits[-1].argmax())]), one.verified)
            session.propose(64)
            one.verify(chain(prompt[-1], 5))

            def read(session: TrainedDrafter = session, accepted: int = accepted) -> None:
                session.observe(Accepted(list(range(accepted - 1)), prompt[:accepted]), one.verified)
                session.propose(64)

            print(f"| of heads {name}, {accepted} tokens accepted | {median_ms(read):.2f} |")


def chain(root: int, nodes: int) -> DraftTree:
    places = np.arange(nodes)
    return DraftTree(root, places, (places - 1).astype(np.int32), np.zeros(nodes, np.uint8))


def median_ms(run: Callable[[], object], rounds: int = 60) -> float:
    found = []
    for _ in range(rounds):
        started = time.process_time()
        run()
        found.append(time.process_time() - started)
    return 1e3 * statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "steps", "speed", "passes", "garbage"))
    parser.add_argument("--heads", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--alone", action="store_true", help="without the heads that are shipped")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--budgets", type=int, nargs="+", default=BUDGETS)
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES)
    parser.add_argument("--plot", type=Path, default=Path("heads.png"))
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    folders = {} if options.alone else {kind_of(folder): folder for folder in demo.HEADS}
    folders |= {name: Path(folder) for name, folder in (given.split("=", 1) for given in options.heads)}
    bench = Bench(options.prompts, options.tokens)
    print(f"{machine()}, one thread; {options.prompts} prompts, {options.tokens} tokens at most\n")
    if options.what == "accuracy":
        accuracy(bench, folders, options.plot)
    elif options.what == "steps":
        steps(bench, folders, options.budgets, options.temperatures)
    elif options.what == "speed":
        speed(bench, folders, options.temperatures)
    elif options.what == "passes":
        passes(bench, folders)
    else:
        garbage(bench, folders)


if __name__ == "__main__":
    main()
