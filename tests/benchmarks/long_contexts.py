"""Measures drafting after long contexts: tokens per second of `hd` and of plain decoding, by context length.

    python -m tests.benchmarks.long_contexts --model smollm2 --contexts 1000 4000 8000
    python -m tests.benchmarks.long_contexts --shape config.json --device cuda --contexts 16000 64000

Each context is another passage of the documentation, followed by a question. The prompt is prefilled once; then both
answer in turn with the same KV cache, and the one that begins alternates. Only the time after the first token counts:
CPU time, or wall-clock time on a GPU. ``--shape`` uses random weights: greedy answers repeat themselves, so most drafts
are accepted; with ``--temperature 1`` hardly any is, which is the worst case.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

from transformers.utils import logging

from hdtool.builders.evaluation.random_models import load_shape
from hdtool.builders.evaluation.threads import set_num_threads
from hdtool.data.chat import encode_conversation, encode_text
from hdtool.runtime.answerer import decode
from hdtool.runtime.budget.cost_curve import MeasuredCosts
from hdtool.runtime.budget.measure_passes import cost_curve_for
from hdtool.runtime.budget.node_budget import MeasuredBudget
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.drafters.methods import drafter_with_budget
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load

DOCS = Path(__file__).parents[2] / "docs"
QUESTION = "Write a letter to a friend about this text, in your own words."


def prompts(loaded: Loaded, length: int, number: int) -> list[list[int]]:
    """Return ``number`` chat prompts, each asking about a text of ``length`` tokens."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    ids = encode_text(loaded.tokenizer, text, special=False)
    ids *= 1 + number * length // len(ids)
    texts = [loaded.tokenizer.decode(ids[place * length : (place + 1) * length]) for place in range(number)]
    return [
        encode_conversation(loaded.tokenizer, [{"role": "user", "content": f"{text}\n\n{QUESTION}"}]) for text in texts
    ]


def answer(
    loaded: Loaded, prompt: list[int], drafter: Drafter | None, max_new_tokens: int, sampling: SamplingConfig
) -> tuple[list[int], float, int]:
    """Return the tokens of an answer, the seconds after the first token, and the number of steps after it."""
    sampler, _ = sampler_for(loaded, sampling, prompt, max_new_tokens=max_new_tokens)
    steps = decode(loaded.target, prompt, sampler, max_new_tokens=max_new_tokens, drafter=drafter)
    clock = time.process_time if loaded.target.device.type == "cpu" else time.perf_counter
    tokens = [*next(steps).tokens]
    started, number = clock(), 0
    for step in steps:
        tokens += step.tokens
        number += 1
    return tokens, clock() - started, number


def compare(loaded: Loaded, length: int, options: argparse.Namespace) -> str:
    decoding = DecodeConfig(method="hd", max_new_tokens=options.tokens)
    costs = MeasuredCosts(loaded.target.log, cost_curve_for(loaded.target), only_timed_sizes=loaded.target.captures)
    stores = StoreSet.for_tokenizer(loaded.tokenizer, StoresConfig(None, None), model=loaded.checkpoint)

    def drafter() -> Drafter:
        return drafter_with_budget(lambda: MeasuredBudget(loaded.target.log, costs), decoding, stores, loaded.target)

    sampling = SamplingConfig(temperature=options.temperature)
    ratios, plain, steps, tokens, differing = [], [], 0, 0, 0
    for prompt in prompts(loaded, length, options.texts):
        answer(loaded, prompt, None, 2, sampling)  # prefills the prompt
        seconds: dict[str, list[float]] = {"ar": [], "hd": []}
        answers: dict[str, list[int]] = {}
        for turn in range(options.rounds):
            for method in ("ar", "hd") if turn % 2 == 0 else ("hd", "ar"):
                used = drafter() if method == "hd" else None
                answers[method], duration, number = answer(loaded, prompt, used, options.tokens, sampling)
                seconds[method].append(duration)
                if method == "hd":
                    steps, tokens = steps + number, tokens + len(answers["hd"]) - 1
            differing += answers["hd"] != answers["ar"]
        plain.append((options.tokens - 1) / median(seconds["ar"]))
        ratios.append(median(seconds["ar"]) / median(seconds["hd"]))
    figures = median(plain), median(ratios), min(ratios), tokens / steps
    cells = [f"{length:,}", f"{figures[0]:.1f}", *(f"{figure:.2f}" for figure in figures[1:])]
    return f"| {' | '.join(cells)} | {differing or 'none'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="also the one whose tokenizer a --shape has")
    parser.add_argument("--shape", help="a shape of bench-shape, or a config.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--activations", default="float32", help="on a CPU")
    parser.add_argument("--contexts", type=int, nargs="*", default=[1000, 4000, 8000])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--texts", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    set_num_threads(options.threads)
    kinds = {"activations": options.activations} if options.device == "cpu" else {}
    config = ModelConfig(options.model, device=options.device, **kinds)
    loaded = load_shape(options.shape, config) if options.shape else load(config)
    numbers = options.activations if options.device == "cpu" else str(loaded.target.dtype).removeprefix("torch.")
    print(f"{machine(loaded.target.device)}; {loaded.name}, {numbers}, {options.tokens} tokens\n")
    print("| context | plain, tokens/s | `hd`: times plain | worst text | tokens per step | answers that differ |")
    print("|---|---|---|---|---|---|", flush=True)
    for length in options.contexts:
        print(compare(loaded, length, options), flush=True)


if __name__ == "__main__":
    main()
