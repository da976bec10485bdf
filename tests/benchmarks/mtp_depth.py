"""Measures tokens per step and per second by the number of MTP passes: ``python -m tests.benchmarks.mtp_depth``.

The hybrid demo model answers its held-out prompts. Methods and numbers of passes take turns at each prompt, each with a
separate drafter, and all answers are compared with plain decoding.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from typing import Any

import torch

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load

PASSES = (0, 1, 2, 3, 4, 6, 8)
"""MTP passes after the first one of a step, which reads the accepted tokens."""
NODES = 24


def drafter_of(method: str, passes: int, loaded: Loaded, stores: StoreSet, *, is_measured: bool) -> Any:
    config = DecodeConfig(method, draft_tokens=None if is_measured else NODES)
    drafter: Any = drafter_for(config, loaded.target, stores)
    trained = getattr(drafter, "trained", None) or getattr(drafter, "_trained", None)
    if trained is not None and not is_measured:
        trained._passes = passes
    return drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(demo.HYBRID))
    parser.add_argument("--model-db", default="none")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(options.model)
    stores = StoreSet.for_tokenizer(
        loaded.tokenizer, StoresConfig(model_db=options.model_db, corpus_db="none"), model=loaded.checkpoint
    )
    cases = [("ar", 0, True), ("hd", 0, True), ("hd", 0, False), ("mtp", 0, True), ("hd+mtp", 0, True)]
    cases += [(method, passes, False) for method in ("mtp", "hd+mtp") for passes in PASSES]
    tokens, steps, seconds = defaultdict[Any, int](int), defaultdict[Any, int](int), defaultdict[Any, float](float)
    differ = 0
    prompts = read_prompts(demo.PROMPTS)
    every = len(prompts) // options.num_prompts or 1
    for number, prompt in enumerate(prompts[::every][: options.num_prompts]):
        ids = encode_conversation(loaded.tokenizer, prompt.messages)
        answers = {}
        for case in cases[number % len(cases) :] + cases[: number % len(cases)]:
            drafter = drafter_of(case[0], case[1], loaded, stores, is_measured=case[2])
            sampler, stops = sampler_for(loaded, SamplingConfig(), ids, max_new_tokens=options.max_new_tokens)
            began, answer = time.perf_counter(), list[int]()
            for step in decode(
                loaded.target, ids, sampler, max_new_tokens=options.max_new_tokens, stops=stops, drafter=drafter
            ):
                answer += step.tokens
                steps[case] += 1
            seconds[case] += time.perf_counter() - began
            tokens[case] += len(answer)
            answers[case] = answer
        differ += sum(answer != answers["ar", 0, True] for answer in answers.values())
    plain = tokens["ar", 0, True] / seconds["ar", 0, True]
    print("| method | passes | tokens per step | tokens/s | speed-up |")
    print("|---|---|---|---|---|")
    for case in cases:
        method, passes, is_measured = case
        shown = "" if method in ("ar", "hd") else "as many as pay" if is_measured else f"1 + {passes}"
        name = f"`{method}`" + ("" if is_measured else f", {NODES} nodes")
        speed = tokens[case] / seconds[case]
        print(f"| {name} | {shown} | {tokens[case] / steps[case]:.2f} | {speed:.1f} | {speed / plain:.2f} |")
    print(f"{differ} answers differ from plain decoding")


if __name__ == "__main__":
    main()
