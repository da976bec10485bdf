"""Measures the host time of a step: everything from the end of one forward pass to the start of the next.

    python -m tests.benchmarks.host --model SmolLM2.gguf     # the model, and the model with larger vocabularies
    python -m tests.benchmarks.host                          # the embedded model

Real passes run between the measurements, so caches are as cold as in an answer. A compiled pass computes a tree's ids,
positions and mask, the layers, the logits and the walk by argmax in one call. Models without compiled passes count
``forward`` as the pass. Larger vocabularies add rows that are never chosen: answers and trees are unchanged, and only
code that reads logits may take longer. The first run of each case is not instrumented and gives the total; the second
one is, and gives the parts without the passes. Prefills are excluded. Answers are decoded to text, as in
``hdtool generate``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers.utils import logging

from hdtool.builders.demo.stores import stores_of_real_model
from hdtool.data import demo
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime import answerer
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.budget.node_budget import FixedBudget, MeasuredBudget, SharedCosts
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig, SamplingConfig
from hdtool.runtime.core import loop, sequence
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.core.sequence import SequenceState, Stats, Step
from hdtool.runtime.drafters.hierarchy.drafter import Hierarchy
from hdtool.runtime.engines.cpu import tree_pass
from hdtool.runtime.generation.text_stream import TextStream
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.target.target import Target

METHODS = {"plain": ("ar", None), "hd, 32 nodes": ("hd", 32), "hd+logitspec, 32": ("hd+logitspec", 32)}
MEASURED = {"hd, as many as pay": ("hd", None)}
LARGER = (128_256, 262_144)
SMALL = 0.05
"""Standard deviation of the embeddings of added tokens relative to the others, so small that none is chosen."""
LOOP = "loop"
PARTS = ("drafter", "budget", "draft", "masks, ids", "accept", "commit", "learn", "observe", "text", "statistics", LOOP)
MARKED: Sequence[tuple[object, str, str]] = (
    (loop, "draft_trees", "draft"),
    (sequence, "draft_many", "drafter"),
    (SequenceState, "accept", "accept"),
    (SequenceState, "observe", "observe"),
    (Hierarchy, "observe", "learn"),
    (NoDraft, "observe", "learn"),
    (FixedBudget, "choose_size", "budget"),
    (MeasuredBudget, "choose_size", "budget"),
    (SharedCosts, "choose_sizes", "budget"),
    (Target, "verify", "masks, ids"),
    (Target, "commit", "commit"),
    (TextStream, "add", "text"),
    (Stats, "add", "statistics"),
)


@dataclass
class HostTimer:
    """Records the host time between passes by the innermost marked function."""

    step_seconds: list[float] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    _open: list[str] = field(default_factory=lambda: [LOOP])
    _part_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _last: float = 0.0
    _ended: float = 0.0
    """End of the last pass of a step; 0 after a prefill."""

    def charge(self, now: float) -> None:
        self._part_seconds[self._open[-1]] += now - self._last
        self._last = now

    def timed_part(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def marked(*arguments: Any, **options: Any) -> Any:
            self.charge(time.perf_counter())
            self._open.append(name)
            try:
                return function(*arguments, **options)
            finally:
                self.charge(time.perf_counter())
                self._open.pop()

        return marked

    def timed_pass(self, compute: Callable[..., Any], is_step: Callable[..., bool]) -> Callable[..., Any]:
        """Wrap the function that computes a pass, to record its start and end."""

        def noted(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            of_step = is_step(*arguments, **options)
            if self._ended and of_step:
                self.charge(began)
                self.step_seconds.append(began - self._ended)
                self.parts.append(dict(self._part_seconds))
            found = compute(*arguments, **options)
            ended = time.perf_counter()
            self._ended = ended if of_step else 0.0
            self.passes.append(ended - began)
            self._part_seconds.clear()
            self._last = ended
            return found

        return noted


@dataclass
class Case:
    """Result of a method on a model, with a hash of all tokens and trees."""

    timer: HostTimer
    tokens: int
    steps: int
    seconds: float
    hash: str


class Bench:
    def __init__(self, loaded: Loaded, stores: StoresConfig, prompts: Sequence[Prompt], max_new_tokens: int) -> None:
        self.loaded, self._stores, self._prompts, self._max_new_tokens = loaded, stores, prompts, max_new_tokens

    def run(self, method: str, nodes: int | None, batch: int, *, marked: bool) -> Case:
        config = DecodeConfig(
            method, self._max_new_tokens, draft_tokens=nodes, batch_size=batch, history="memory", prefix_caching=False
        )
        with mock.patch.object(answerer, "load", lambda _: self.loaded):
            asked = Answerer(ModelConfig(device="cpu", threads=1), config, SamplingConfig(), store_set=self._stores)
        timer, found = HostTimer(), hashlib.sha256()
        tokens = steps = 0
        model = self.loaded.target.model
        with ExitStack() as patches:
            if marked:
                for owner, name, part in MARKED:
                    patches.enter_context(mock.patch.object(owner, name, timer.timed_part(part, getattr(owner, name))))
            if self.loaded.target.compiled:
                for name, is_step in (("compute_tree", _is_compiled_step), ("compute_trees", lambda *_: True)):
                    compute = timer.timed_pass(getattr(tree_pass, name), is_step)
                    patches.enter_context(mock.patch.object(tree_pass, name, compute))
            else:
                forward = timer.timed_pass(model.forward, _is_forward_step)
                patches.enter_context(mock.patch.object(model, "forward", forward))
            if marked:
                patches.enter_context(mock.patch.object(Stats, "add", _hashing(Stats.add, found)))
            gc.collect()
            began = time.perf_counter()
            for answer in asked.all_answers(self._prompts):
                for piece in answer:
                    found.update(piece.encode() if marked else b"")
                tokens, steps = tokens + answer.stats.tokens, steps + answer.stats.steps
            seconds = time.perf_counter() - began
        return Case(timer, tokens, steps, seconds, found.hexdigest()[:12])


def _is_compiled_step(*given: Any) -> bool:
    """Return True unless the compiled pass is a piece of a prompt, which has logits for its last row only."""
    first, walks = given[-4:-2]
    return bool(walks or first == 0)


def _is_forward_step(**options: Any) -> bool:
    return options["attention_mask"] is not None or options["input_ids"].shape[1] == 1


def _hashing(add: Callable[[Stats, Step], None], found: Any) -> Callable[[Stats, Step], None]:
    def hashed(self: Stats, step: Step) -> None:
        for part in (step.tree.tokens, step.tree.parents, step.tree.sources, step.tokens, step.path):
            found.update(np.array(part, np.int64).tobytes())
        add(self, step)

    return hashed


def with_vocabulary(loaded: Loaded, tokens: int) -> Loaded:
    """Return the model with additional tokens that are never chosen."""
    model: Any = loaded.target.model
    own = model.get_input_embeddings().weight
    before, spread = len(own), float(own.detach().std())
    model.resize_token_embeddings(tokens, mean_resizing=False)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            more = torch.randn(tokens - before, layer.weight.shape[1], generator=chance)
            layer.weight[before:] = SMALL * spread * more
    compile_linear_layers(model)
    target = Target(model)
    target.compile()
    return replace(loaded, target=target)


def show(name: str, batch: int, plain: Case, marked: Case) -> None:
    whole = np.array(plain.timer.step_seconds) * 1e6
    cells = []
    for part in PARTS:
        found = np.array([step.get(part, 0.0) for step in marked.timer.parts]) * 1e6
        cells.append(f"{np.median(found):.0f} / {np.quantile(found, 0.9):.0f}")
    passes = f"{np.median(plain.timer.passes) * 1e3:.1f}"
    total = f"**{np.median(whole):.0f}** / {np.quantile(whole, 0.9):.0f} | {np.median(whole) / batch:.0f}"
    print(
        f"| {name} | {batch} | {total} | {' | '.join(cells)} | {passes} | {marked.tokens / marked.steps:.2f} "
        f"| {plain.tokens / plain.seconds:.1f} | {marked.hash} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--activations", choices=ACTIVATIONS, default=ACTIVATIONS[0])
    parser.add_argument(
        "--vocabularies", type=int, nargs="*", default=None, help="larger ones to measure as well; in float32"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--methods", nargs="+", default=[*METHODS, *MEASURED])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    is_embedded = options.model is None
    resizable = not is_embedded and options.activations == ACTIVATIONS[0]
    larger = options.vocabularies if options.vocabularies is not None else LARGER if resizable else ()
    config = replace(
        ModelConfig(device="cpu", activations=options.activations), **({} if is_embedded else {"model": options.model})
    )
    loaded = load(config)
    stores = (
        StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX)) if is_embedded else stores_of_real_model(config)
    )
    files = (demo.PROMPTS,) if is_embedded else (demo.QUESTIONS, demo.PROMPTS)
    prompts = [prompt for file in files for prompt in read_prompts(file)][: options.prompts]
    print(f"{machine()}; 1 thread, {len(prompts)} prompts, up to {options.tokens} tokens each\n")
    print("Microseconds of a step on the host, p50 / p90:\n")
    head = ("method", "batch", "whole", "a row", *PARTS, "pass, ms", "tokens per step", "tokens/s", "hash")
    for vocabulary in (loaded.target.vocabulary, *larger):
        if vocabulary != loaded.target.vocabulary:
            loaded = with_vocabulary(load(replace(config, fused_layers=False)), vocabulary)
        print(f"\n{vocabulary:,} tokens of vocabulary\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
        bench = Bench(loaded, stores, prompts, options.tokens)
        for batch in options.batches:
            for name, (method, nodes) in {**METHODS, **(MEASURED if batch == 1 else {})}.items():
                if name in options.methods:
                    show(name, batch, *(bench.run(method, nodes, batch, marked=marked) for marked in (False, True)))


if __name__ == "__main__":
    main()
